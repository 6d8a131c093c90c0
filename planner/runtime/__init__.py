"""Running a plan: backends do the work, workers hold them, the engine decides, dispatches and commits."""
