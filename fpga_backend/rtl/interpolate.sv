// base + (delta * fraction + 2^(BITS-1) >> BITS). The entry of a ROM comes two cycles after the fraction; the result
// five cycles after it.
module interpolate #(parameter int BITS = 8) (
  input  wire               clk,
  input  wire [BITS-1:0]    fraction,
  input  wire signed [18:0] base,
  input  wire signed [12:0] delta,
  output reg signed [18:0]  out
);
  wire [BITS-1:0] place;
  delay #(.WIDTH(BITS), .CYCLES(2)) wait_rom (.clk, .in(fraction), .out(place));
  reg signed [21:0] product, rounded;
  reg signed [18:0] base_1, base_2;
  always_ff @(posedge clk) begin
    product <= delta * $signed({1'b0, place});
    base_1 <= base;
    rounded <= product + (22'sd1 <<< (BITS - 1));
    base_2 <= base_1;
    out <= base_2 + 19'(rounded >>> BITS);
  end
endmodule
