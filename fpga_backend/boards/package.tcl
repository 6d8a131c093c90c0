# NEVER RUN: no Vivado was at hand when this was written. Read it as a plan, and expect to mend it.
# Packages the core as an IP. Needs: build (folder with draft_core_top.v and registers.tcl), rtl, engines, part.
source $build/registers.tcl
create_project -force package $build/package -part $part
add_files [glob $rtl/*.sv] $build/draft_core_top.v
set_property top draft_core_top [current_fileset]
ipx::package_project -root_dir $build/ip -vendor $core_vendor -library $core_library -taxonomy /heteroreason -import_files -force
set core [ipx::current_core]
set_property name $core_name $core
set_property version $core_version $core
# Vivado infers s_axi and m<n>_axi from the names of the ports; each belongs to the only clock.
ipx::associate_bus_interfaces -busif s_axi -clock aclk $core
for {set e 0} {$e < $engines} {incr e} {
  ipx::associate_bus_interfaces -busif m${e}_axi -clock aclk $core
}
set map [ipx::get_memory_maps s_axi -of_objects $core]
add_registers [ipx::get_address_blocks reg0 -of_objects $map]
set_property core_revision 1 $core
ipx::create_xgui_files $core
ipx::update_checksums $core
ipx::check_integrity $core
ipx::save_core $core
close_project
