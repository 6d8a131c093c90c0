# NEVER RUN: no Vivado and no board was at hand when this was written. Read it as a plan, and expect to mend it.
#
# A bitstream for a Zynq UltraScale+ board that pynq runs on. Four engines of 16 lanes: each fills one of the four
# 128-bit HP ports to the memory, which a wider engine could not.
#
#   vivado -mode batch -source fpga_backend/boards/zynq.tcl -tclargs BOARD BUILD CLOCK_HZ
#
# BOARD: kv260 or zcu104. BUILD: folder in which `python -m fpga_backend.boards.wrapper` has written its files.
lassign $argv board build clock_hz
set rtl [file normalize [file dirname [info script]]/../rtl]
set engines 4
switch $board {
  kv260 { set part xck26-sfvc784-2LV-c; set board_part xilinx.com:kv260_som:part0:1.4 }
  zcu104 { set part xczu7ev-ffvc1156-2-e; set board_part xilinx.com:zcu104:part0:1.1 }
  default { error "board '$board' is unknown: use kv260 or zcu104" }
}
source [file dirname [info script]]/package.tcl

create_project -force draft $build/draft -part $part
set_property board_part $board_part [current_project]
set_property ip_repo_paths $build/ip [current_project]
update_ip_catalog
create_bd_design draft
set ps [create_bd_cell -type ip -vlnv xilinx.com:ip:zynq_ultra_ps_e ps]
apply_bd_automation -rule xilinx.com:bd_rule:zynq_ultra_ps_e -config {apply_board_preset 1} $ps
set_property -dict [list \
  CONFIG.PSU__USE__M_AXI_GP0 1 CONFIG.PSU__USE__M_AXI_GP1 0 CONFIG.PSU__USE__M_AXI_GP2 0 \
  CONFIG.PSU__USE__S_AXI_GP2 1 CONFIG.PSU__USE__S_AXI_GP3 1 CONFIG.PSU__USE__S_AXI_GP4 1 CONFIG.PSU__USE__S_AXI_GP5 1 \
  CONFIG.PSU__SAXIGP2__DATA_WIDTH 128 CONFIG.PSU__SAXIGP3__DATA_WIDTH 128 \
  CONFIG.PSU__SAXIGP4__DATA_WIDTH 128 CONFIG.PSU__SAXIGP5__DATA_WIDTH 128 \
  CONFIG.PSU__CRL_APB__PL0_REF_CTRL__FREQMHZ [expr {$clock_hz / 1e6}] ] $ps
set core [create_bd_cell -type ip -vlnv $core_vendor:$core_library:$core_name:$core_version draft_core_0]
set_property CONFIG.CLOCK_HZ $clock_hz $core
set reset [create_bd_cell -type ip -vlnv xilinx.com:ip:proc_sys_reset reset]
set clock [get_bd_pins ps/pl_clk0]
connect_bd_net $clock [get_bd_pins reset/slowest_sync_clk] [get_bd_pins draft_core_0/aclk] [get_bd_pins ps/maxihpm0_fpd_aclk]
connect_bd_net [get_bd_pins ps/pl_resetn0] [get_bd_pins reset/ext_reset_in]
connect_bd_net [get_bd_pins reset/peripheral_aresetn] [get_bd_pins draft_core_0/aresetn]
proc connect_through {name from to clock} {
  # A SmartConnect converts AXI4 to AXI4-Lite, and 64-bit addresses to those of the port.
  set made [create_bd_cell -type ip -vlnv xilinx.com:ip:smartconnect $name]
  set_property CONFIG.NUM_SI 1 $made
  connect_bd_intf_net [get_bd_intf_pins $from] [get_bd_intf_pins $name/S00_AXI]
  connect_bd_intf_net [get_bd_intf_pins $name/M00_AXI] [get_bd_intf_pins $to]
  connect_bd_net $clock [get_bd_pins $name/aclk]
  connect_bd_net [get_bd_pins reset/interconnect_aresetn] [get_bd_pins $name/aresetn]
}
connect_through control ps/M_AXI_HPM0_FPD draft_core_0/s_axi $clock
for {set e 0} {$e < $engines} {incr e} {
  connect_bd_net $clock [get_bd_pins ps/saxihp${e}_fpd_aclk]
  connect_through memory$e draft_core_0/m${e}_axi ps/S_AXI_HP${e}_FPD $clock
}
assign_bd_address
validate_bd_design
save_bd_design
set wrapper [make_wrapper -files [get_files draft.bd] -top]
add_files -norecurse $wrapper
set_property top draft_wrapper [current_fileset]
launch_runs impl_1 -to_step write_bitstream -jobs 8
wait_on_run impl_1
if {[get_property STATS.WNS [get_runs impl_1]] < 0} { error "timing is not met at $clock_hz Hz: lower CLOCK_HZ" }
# pynq wants the description beside the bitstream, equally named.
file copy -force [glob $build/draft/draft.runs/impl_1/*.bit] $build/draft_$board.bit
file copy -force [glob $build/draft/draft.gen/sources_1/bd/draft/hw_handoff/draft.hwh] $build/draft_$board.hwh
