// sum * multiplier / 2^s, halves upwards, saturated. The sum is first scaled up by its headroom and cut into halves
// (docs/integer-model.md), so nothing is wider than 32 bits; `shift` is s + headroom - 16, 1 to 30.
module requantise (
  input  wire               clk,
  input  wire               rst,
  input  wire               valid,
  input  wire               last,
  input  wire signed [31:0] sum,
  input  wire [14:0]        multiplier,
  input  wire [4:0]         shift,
  input  wire [4:0]         headroom,    // stable during a command
  input  wire [22:0]        limit,       // stable during a command
  output wire               out_valid,
  output wire               out_last,
  output reg signed [22:0]  out
);
  localparam int LATENCY = 9;
  reg [LATENCY-1:0] valids, lasts;
  always_ff @(posedge clk) begin
    valids <= rst ? '0 : {valids[LATENCY-2:0], valid};
    lasts <= {lasts[LATENCY-2:0], last};
  end
  assign out_valid = valids[LATENCY-1];
  assign out_last = lasts[LATENCY-1];

  reg signed [31:0] coarse, scaled, upper, upper_late, product, rounded, part, whole, half, half_late, half_last, most, least;
  reg [30:0] lower, lower_late;
  reg [14:0] multiplier_1, multiplier_2;
  reg [4:0] shift_1, shift_2, shift_3, shift_4, shift_5, shift_6;
  reg [2:0] shift_7;
  always_ff @(posedge clk) begin
    // 1, 2: scale up
    coarse <= sum <<< {headroom[4:3], 3'd0};
    scaled <= coarse <<< headroom[2:0];
    {multiplier_1, shift_1} <= {multiplier, shift};
    {multiplier_2, shift_2} <= {multiplier_1, shift_1};
    // 3, 4: two products of 16 by 15 bits
    upper <= $signed(scaled[31:16]) * $signed({1'b0, multiplier_2});
    lower <= scaled[15:0] * multiplier_2;
    shift_3 <= shift_2;
    half <= 32'sd1 <<< (shift_2 - 5'd1);
    upper_late <= upper; lower_late <= lower; half_late <= half; shift_4 <= shift_3;
    // 5, 6: sum and rounding
    product <= upper_late + $signed({17'd0, lower_late[30:16]});
    half_last <= half_late; shift_5 <= shift_4;
    rounded <= product + half_last; shift_6 <= shift_5;
    // 7, 8: shift
    part <= rounded >>> {shift_6[4:3], 3'd0}; shift_7 <= shift_6[2:0];
    whole <= part >>> shift_7;
    // 9: saturate
    most <= $signed({9'd0, limit}); least <= -$signed({9'd0, limit});
    out <= whole > most ? most[22:0] : whole < least ? least[22:0] : whole[22:0];
  end
endmodule
