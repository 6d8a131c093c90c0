# NEVER RUN: no Vivado, Vitis or card was at hand when this was written. Read it as a plan, and expect to mend it.
#
# An RTL kernel (.xo) for Alveo U280 with eight engines of 64 lanes, each on an HBM pseudo-channel of its own.
#
#   vivado -mode batch -source fpga_backend/boards/vitis.tcl -tclargs BUILD
#   v++ --link --target hw --platform xilinx_u280_gen3x16_xdma_1_202211_1 --config fpga_backend/boards/u280.cfg \
#       --output BUILD/draft.xclbin BUILD/draft_core.xo
#
# The core has a register map of its own, so it is a user-managed kernel: XRT loads it and hands out memory, and no XRT
# call starts it. pynq 3.0.1 is the last pynq that knows Alveo, with XRT up to 2.16. Later XRT: pyxrt (`xrt::ip`).
lassign $argv build
set rtl [file normalize [file dirname [info script]]/../rtl]
set engines 8
set part xcu280-fsvh2892-2L-e
source [file dirname [info script]]/package.tcl
package_xo -force -xo_path $build/draft_core.xo -kernel_name $core_name -ip_directory $build/ip -ctrl_protocol user_managed
