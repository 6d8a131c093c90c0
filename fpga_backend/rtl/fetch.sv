// AXI4 read master of one engine: requests of any length become bursts, their data a stream. A burst is asked for
// only when the stream's FIFO has room for all of it, so data is always accepted.
module fetch #(parameter int LANES = 64, parameter int DEPTH = 512, parameter int BURST = 64) (
  input  wire               clk,
  input  wire               rst,
  // Request, in beats. No request may be made while `ready` is low.
  input  wire               request,
  input  wire [31:0]        address,
  input  wire [31:0]        beats,
  output wire               ready,
  // Stream
  output wire               valid,
  input  wire               pop,
  output wire [LANES*8-1:0] data,
  // State
  output reg                pending,
  output reg                failed,   // a pulse
  output wire               arrived,  // a beat
  // AXI4, addresses in beats
  output reg                arvalid,
  input  wire               arready,
  output reg  [31:0]        araddr,
  output reg  [7:0]         arlen,
  input  wire               rvalid,
  input  wire [LANES*8-1:0] rdata,
  input  wire [1:0]         rresp
);
  localparam int BITS = $clog2(DEPTH);
  localparam int BURST_BITS = $clog2(BURST);
  localparam logic [2:0] IDLE = 3'd0, SIZE = 3'd1, COMPARE = 3'd2, ROOM = 3'd3, SEND = 3'd4;
  reg [2:0] state;
  reg fits;                                // room only grows until a burst is granted
  reg [31:0] at, left;
  reg [BITS:0] room;                       // free places that no burst has reserved
  reg popped;
  reg [BITS:0] awaited;
  reg [BURST_BITS:0] size;
  // A burst ends where its address is a multiple of BURST beats, so it never crosses 4096 bytes.
  wire [BURST_BITS:0] to_border = (BURST_BITS+1)'(BURST) - {1'b0, at[BURST_BITS-1:0]};
  wire grant = state == ROOM && fits;
  assign ready = state == IDLE;
  assign arrived = rvalid;

  always_ff @(posedge clk) begin
    failed <= rvalid && rresp[1];
    fits <= room >= (BITS+1)'(size);
    pending <= awaited != 0 || state != IDLE;
    if (rst) begin
      state <= IDLE; arvalid <= 1'b0; room <= (BITS+1)'(DEPTH); awaited <= '0; left <= '0; popped <= 1'b0;
    end else begin
      popped <= pop;
      room <= room - (grant ? (BITS+1)'(size) : '0) + (BITS+1)'(popped);
      awaited <= awaited + (grant ? (BITS+1)'(size) : '0) - (BITS+1)'(rvalid);
      case (state)
        IDLE: if (request) begin
          at <= address; left <= beats;
          if (beats != 0) state <= SIZE;
        end
        SIZE: begin
          size <= left < 32'(to_border) ? left[BURST_BITS:0] : to_border;
          state <= COMPARE;
        end
        COMPARE: state <= ROOM;
        ROOM: if (fits) begin
          arvalid <= 1'b1; araddr <= at; arlen <= 8'(size - 1'b1);
          at <= at + 32'(size); left <= left - 32'(size);
          state <= SEND;
        end
        SEND: if (arready) begin
          arvalid <= 1'b0;
          state <= left == 0 ? IDLE : SIZE;
        end
        default: state <= IDLE;
      endcase
    end
  end

  wire [BITS:0] level;
  fifo #(.WIDTH(LANES*8), .DEPTH(DEPTH)) stream (
    .clk, .rst, .push(rvalid), .push_data(rdata), .valid, .pop, .data, .level);
endmodule
