// The gated product to int8: divided by 2^exponent, halves upwards. As scale shifts by one at least, it is doubled.
module product #(parameter int VECTOR_BITS = 12) (
  input  wire                   clk,
  input  wire                   rst,
  input  wire                   start,
  input  wire [19:0]            rows,
  input  wire [VECTOR_BITS-1:0] source,
  input  wire [3:0]             exponent,
  output reg  [VECTOR_BITS-1:0] vector_address,
  input  wire signed [15:0]     vector_data,
  output wire                   valid,
  output wire                   last,
  output wire signed [7:0]      out
);
  reg running;
  reg [19:0] left;
  reg [2:1] run, ends;
  always_ff @(posedge clk) begin
    run <= rst ? '0 : {run[1], running};
    ends <= {ends[1], left == 20'd1};
    if (rst) running <= 1'b0;
    else if (start) begin
      running <= 1'b1; left <= rows; vector_address <= source;
    end else if (running) begin
      left <= left - 20'd1; vector_address <= vector_address + 1'b1;
      if (left == 20'd1) running <= 1'b0;
    end
  end
  scale #(.A(16), .B(3), .OUT(8)) divide (
    .clk, .rst, .valid(run[2]), .last(ends[2]), .a(vector_data), .b(3'sd2), .shift({1'b0, exponent} + 5'd1), .limit(7'd127),
    .out_valid(valid), .out_last(last), .out);
endmodule
