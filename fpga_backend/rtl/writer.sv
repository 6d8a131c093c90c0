// AXI4 write master. Everything is written byte by byte; bytes that follow each other into the same beat go out together.
module writer #(parameter int LANES = 64, parameter int DEPTH = 64, localparam int LANE_BITS = $clog2(LANES)) (
  input  wire                 clk,
  input  wire                 rst,
  input  wire                 push,
  input  wire [31:0]          push_address,  // in beats
  input  wire [LANE_BITS-1:0] push_lane,
  input  wire [7:0]           push_byte,
  output reg                  room,          // for all that is in a pipeline; checked before work goes into one
  output reg                  pending,       // something is not yet answered
  output reg                  failed,        // a pulse
  // AXI4, single beats, addresses in beats
  output reg                  awvalid,
  input  wire                 awready,
  output reg  [31:0]          awaddr,
  output reg                  wvalid,
  input  wire                 wready,
  output reg  [LANES*8-1:0]   wdata,
  output reg  [LANES-1:0]     wstrb,
  input  wire                 bvalid,
  input  wire [1:0]           bresp
);
  localparam int BITS = $clog2(DEPTH);
  localparam int WIDTH = 1 + 32 + LANE_BITS + 8;
  wire valid;
  wire [31:0] address;
  wire [LANE_BITS-1:0] lane;
  wire [7:0] value;
  wire [BITS:0] level;
  wire pop;
  // Whether a byte belongs to the beat of the byte before it is found out on the way in, where there is time.
  reg pushed;
  wire same;
  reg [31:0] pushed_address, address_before;
  reg [LANE_BITS-1:0] pushed_lane;
  reg [7:0] pushed_byte;
  always_ff @(posedge clk) begin
    pushed <= push && !rst;
    pushed_address <= push_address; pushed_lane <= push_lane; pushed_byte <= push_byte;
    if (pushed) address_before <= pushed_address;
  end
  fifo #(.WIDTH(WIDTH), .DEPTH(DEPTH)) queue (
    .clk, .rst, .push(pushed), .push_data({pushed_address == address_before, pushed_address, pushed_lane, pushed_byte}), .valid,
    .pop, .data({same, address, lane, value}), .level);

  // The beat that is being collected.
  reg open;
  reg [31:0] at;
  reg [LANES*8-1:0] beat;
  reg [LANES-1:0] strobe;
  reg [2:0] quiet;                 // cycles without a byte: the beat goes out
  reg [7:0] unanswered;
  wire free = !awvalid && !wvalid && !unanswered[7];
  wire joins = open && same;
  wire close = open && free && (valid ? !joins : quiet[2]);
  assign pop = valid && (!open || joins || close);

  always_ff @(posedge clk) begin
    room <= level < (BITS+1)'(DEPTH / 2);
    pending <= push || pushed || level != 0 || open || awvalid || wvalid || unanswered != 0;
    failed <= bvalid && bresp[1];
    if (pop) begin
      at <= address;
      for (int i = 0; i < LANES; i++) if (lane == LANE_BITS'(i)) beat[8*i +: 8] <= value;
      strobe <= (joins ? strobe : '0) | (LANES'(1) << lane);
    end
    if (close) begin
      awaddr <= at; wdata <= beat; wstrb <= strobe;
    end
    if (rst) begin
      open <= 1'b0; awvalid <= 1'b0; wvalid <= 1'b0; unanswered <= '0; quiet <= '0;
    end else begin
      open <= pop || (open && !close);
      quiet <= valid ? '0 : {quiet[1:0], 1'b1};
      awvalid <= close || (awvalid && !awready);
      wvalid <= close || (wvalid && !wready);
      unanswered <= unanswered + 8'(close) - 8'(bvalid);
    end
  end
endmodule
