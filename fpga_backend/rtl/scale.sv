// a * b / 2^shift, halves upwards, saturated to -limit .. limit. The product has at most 31 bits with its sign.
module scale #(parameter int A = 17, parameter int B = 17, parameter int OUT = 16) (
  input  wire                  clk,
  input  wire                  rst,
  input  wire                  valid,
  input  wire                  last,
  input  wire signed [A-1:0]   a,
  input  wire signed [B-1:0]   b,
  input  wire [4:0]            shift,    // 1 to 30, stable during a command
  input  wire [OUT-2:0]        limit,
  output wire                  out_valid,
  output wire                  out_last,
  output reg signed [OUT-1:0]  out
);
  localparam int LATENCY = 7;
  reg [LATENCY-1:0] valids, lasts;
  reg signed [A-1:0] a_held;
  reg signed [B-1:0] b_held;
  reg signed [31:0] product, product_late, rounded, part, whole, half;
  wire signed [31:0] most = $signed({{(33-OUT){1'b0}}, limit});
  always_ff @(posedge clk) begin
    valids <= rst ? '0 : {valids[LATENCY-2:0], valid};
    lasts <= {lasts[LATENCY-2:0], last};
    half <= 32'sd1 <<< (shift - 5'd1);
    a_held <= a; b_held <= b;
    product <= a_held * b_held;
    product_late <= product;
    rounded <= product_late + half;
    part <= rounded >>> {shift[4:3], 3'd0};
    whole <= part >>> shift[2:0];
    out <= whole > most ? most[OUT-1:0] : whole < -most ? -most[OUT-1:0] : whole[OUT-1:0];
  end
  assign out_valid = valids[LATENCY-1];
  assign out_last = lasts[LATENCY-1];
endmodule
