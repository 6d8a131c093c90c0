// The next token: the largest of logit + temperature * noise, the lowest id of equals.
module choose (
  input  wire               clk,
  input  wire               rst,
  input  wire               start,
  input  wire [31:0]        key_upper,
  input  wire [31:0]        key_lower,
  input  wire [13:0]        temperature,   // units of 2^-10; 0: noise becomes 0
  input  wire [31:0]        position,      // of the token to be chosen
  input  wire               valid,
  input  wire               last,
  input  wire signed [22:0] logit,
  output reg  [19:0]        token,
  output reg                done           // a pulse
);
  // Noise of the token whose logit comes now.
  reg [31:0] id;
  always_ff @(posedge clk)
    if (start) id <= '0;
    else if (valid) id <= id + 32'd1;
  wire [31:0] bits;
  wire signed [18:0] noise;
  threefry random (.clk, .key_upper, .key_lower, .x0(position), .x1(id), .out(bits));
  gumbel to_noise (.clk, .bits, .out(noise));
  localparam int NOISE = 26 + 12;
  wire noise_valid, noise_last, scaled_valid, scaled_last;
  reg [NOISE-1:0] valids, lasts;
  always_ff @(posedge clk) begin
    valids <= rst ? '0 : {valids[NOISE-2:0], valid};
    lasts <= {lasts[NOISE-2:0], last};
  end
  assign noise_valid = valids[NOISE-1];
  assign noise_last = lasts[NOISE-1];
  wire signed [23:0] scaled;
  scale #(.A(18), .B(15), .OUT(24)) by_temperature (
    .clk, .rst, .valid(noise_valid), .last(noise_last), .a(noise[17:0]), .b({1'b0, temperature}), .shift(5'd10),
    .limit(23'h7FFFFF), .out_valid(scaled_valid), .out_last(scaled_last), .out(scaled));
  wire signed [22:0] logit_late;
  delay #(.WIDTH(23), .CYCLES(NOISE + 7)) wait_noise (.clk, .in(logit), .out(logit_late));

  reg signed [24:0] score, best;
  reg score_valid, score_last, none;
  reg [19:0] at;
  always_ff @(posedge clk) begin
    score <= 25'(logit_late) + 25'(scaled);
    score_valid <= scaled_valid && !rst; score_last <= scaled_last;
    done <= score_valid && score_last;
    if (start) begin
      none <= 1'b1; at <= '0;
    end else if (score_valid) begin
      none <= 1'b0; at <= at + 20'd1;
      if (none || score > best) begin
        best <= score; token <= at;
      end
    end
  end
endmodule
