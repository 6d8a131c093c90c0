"""When and where: a window's tasks in time on the devices of a machine."""
