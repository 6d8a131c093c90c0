// The core behind five pins, for place and route alone: its inputs come from a shift register, its outputs go into one.
module ecp5_top #(
  parameter int LANES = 16,
  parameter int ENGINES = 1
) (
  input  wire clk,
  input  wire rst,
  input  wire in,
  input  wire take,
  output wire out
);
  localparam int INPUTS = 63 + ENGINES * (5 + 8 * LANES);
  localparam int OUTPUTS = 139 + 9 * LANES + ENGINES * 74;
  reg held_rst, held_take;
  reg [INPUTS-1:0] inputs;
  reg [OUTPUTS-1:0] shift;
  wire [OUTPUTS-1:0] outputs;
  always_ff @(posedge clk) begin
    held_rst <= rst;
    held_take <= take;
    inputs <= {inputs[INPUTS-2:0], in};
    shift <= held_take ? outputs : {shift[OUTPUTS-2:0], 1'b0};
  end
  assign out = shift[OUTPUTS-1];

  wire s_awvalid, s_wvalid, s_bready, s_arvalid, s_rready, m_awready, m_wready, m_bvalid;
  wire [7:0] s_awaddr, s_araddr;
  wire [31:0] s_wdata;
  wire [3:0] s_wstrb;
  wire [1:0] m_bresp;
  wire [ENGINES-1:0] m_arready, m_rvalid, m_rlast;
  wire [ENGINES*LANES*8-1:0] m_rdata;
  wire [ENGINES*2-1:0] m_rresp;
  assign {s_awvalid, s_awaddr, s_wvalid, s_wdata, s_wstrb, s_bready, s_arvalid, s_araddr, s_rready, m_arready, m_rvalid, m_rdata,
    m_rresp, m_rlast, m_awready, m_wready, m_bvalid, m_bresp} = inputs;

  wire irq, s_awready, s_wready, s_bvalid, s_arready, s_rvalid, m_awvalid, m_wvalid, m_wlast, m_bready;
  wire [1:0] s_bresp, s_rresp, m_arburst, m_awburst;
  wire [31:0] s_rdata;
  wire [ENGINES-1:0] m_arvalid, m_rready;
  wire [ENGINES*64-1:0] m_araddr;
  wire [ENGINES*8-1:0] m_arlen;
  wire [2:0] m_arsize, m_awsize;
  wire [63:0] m_awaddr;
  wire [7:0] m_awlen;
  wire [LANES*8-1:0] m_wdata;
  wire [LANES-1:0] m_wstrb;
  assign outputs = {irq, s_awready, s_wready, s_bvalid, s_bresp, s_arready, s_rvalid, s_rdata, s_rresp, m_arvalid, m_araddr, m_arlen,
    m_arsize, m_arburst, m_rready, m_awvalid, m_awaddr, m_awlen, m_awsize, m_awburst, m_wvalid, m_wdata, m_wstrb, m_wlast, m_bready};

  draft_core #(.LANES(LANES), .ENGINES(ENGINES)) core (
    .clk, .rst(held_rst), .irq, .s_awvalid, .s_awready, .s_awaddr, .s_wvalid, .s_wready, .s_wdata, .s_wstrb, .s_bvalid, .s_bready,
    .s_bresp, .s_arvalid, .s_arready, .s_araddr, .s_rvalid, .s_rready, .s_rdata, .s_rresp, .m_arvalid, .m_arready, .m_araddr,
    .m_arlen, .m_arsize, .m_arburst, .m_rvalid, .m_rready, .m_rdata, .m_rresp, .m_rlast, .m_awvalid, .m_awready, .m_awaddr, .m_awlen,
    .m_awsize, .m_awburst, .m_wvalid, .m_wready, .m_wdata, .m_wstrb, .m_wlast, .m_bvalid, .m_bready, .m_bresp);
endmodule
