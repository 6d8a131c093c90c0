// The input, CYCLES cycles later.
module delay #(parameter int WIDTH = 8, parameter int CYCLES = 1) (
  input  wire             clk,
  input  wire [WIDTH-1:0] in,
  output wire [WIDTH-1:0] out
);
  reg [WIDTH-1:0] held [0:CYCLES-1];
  always_ff @(posedge clk) begin
    held[0] <= in;
    for (int i = 1; i < CYCLES; i++) held[i] <= held[i-1];
  end
  assign out = held[CYCLES-1];
endmodule
