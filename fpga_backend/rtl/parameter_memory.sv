// Gains, a row of the embedding, cosine and sine: written a beat at a time, read 32 bits at a time.
module parameter_memory #(parameter int LANES = 64, parameter int DEPTH = 256, localparam int BITS = $clog2(DEPTH)) (
  input  wire               clk,
  input  wire               write,
  input  wire [BITS-1:0]    write_address,
  input  wire [LANES*8-1:0] write_data,
  input  wire [15:0]        address,      // in bytes
  output reg  [31:0]        data          // three cycles later: the bytes from `address`, which must be aligned to their size
);
  localparam int LANE_BITS = $clog2(LANES);
  wire [LANES*8-1:0] beat;
  wire [LANE_BITS-1:0] lane;
  ram #(.WIDTH(LANES*8), .DEPTH(DEPTH)) beats (
    .clk, .write, .write_address, .write_data, .address(address[LANE_BITS +: BITS]), .data(beat));
  delay #(.WIDTH(LANE_BITS), .CYCLES(2)) lanes (.clk, .in(address[LANE_BITS-1:0]), .out(lane));
  wire [31:0] word = beat[{lane[LANE_BITS-1:2], 5'd0} +: 32];
  always_ff @(posedge clk)
    case (lane[1:0])
      2'd0: data <= word;
      2'd1: data <= {8'd0, word[31:8]};
      2'd2: data <= {16'd0, word[31:16]};
      2'd3: data <= {24'd0, word[31:24]};
    endcase
endmodule
