// Scores into a memory; then, by their distance to the largest, unnormalised weights, their sum and its reciprocal.
module softmax #(parameter int CONTEXT = 2048, localparam int BITS = $clog2(CONTEXT)) (
  input  wire               clk,
  input  wire               rst,
  // SCORES
  input  wire               clear,         // before the first score
  input  wire               score_valid,
  input  wire signed [31:0] score,
  // SOFTMAX: distances go to the shared requantiser and come back in octaves, UQ5.8
  input  wire               start,
  input  wire [BITS:0]      rows,
  output wire               distance_valid,
  output wire               distance_last,
  output reg signed [31:0]  distance,
  input  wire               octaves_valid,
  input  wire               octaves_last,
  input  wire [12:0]        octaves,
  output wire               valid,
  output wire               last,
  output reg  [13:0]        weight,
  // For the mean: the sum of weights is mantissa * 2^exponent
  output wire [16:0]        inverse,
  output reg  [4:0]         exponent,
  output reg                done           // a pulse: inverse and exponent are there
);
  reg [BITS-1:0] write_address, address;
  reg signed [31:0] largest, score_held;
  reg some, score_held_valid;
  wire signed [31:0] read;
  ram #(.WIDTH(32), .DEPTH(CONTEXT)) scores (
    .clk, .write(score_valid), .write_address, .write_data(score), .address, .data(read));
  always_ff @(posedge clk) begin
    score_held <= score; score_held_valid <= score_valid;
    if (clear) begin
      write_address <= '0; some <= 1'b0;
    end else begin
      if (score_valid) write_address <= write_address + 1'b1;
      if (score_held_valid) begin
        some <= 1'b1;
        if (!some || score_held > largest) largest <= score_held;
      end
    end
  end

  reg running;
  reg [BITS:0] left;
  reg [2:0] run, ends;
  assign distance_valid = run[2];
  assign distance_last = ends[2];
  always_ff @(posedge clk) begin
    run <= rst ? '0 : {run[1:0], running};
    ends <= {ends[1:0], left == 1};
    distance <= largest - read;
    if (rst) running <= 1'b0;
    else if (start) begin
      running <= 1'b1; left <= rows; address <= '0;
    end else if (running) begin
      left <= left - 1'b1; address <= address + 1'b1;
      if (left == 1) running <= 1'b0;
    end
  end

  // 2^-fraction, then whole octaves.
  wire signed [14:0] fraction;
  rom_exp2 table_exp2 (.clk, .address(octaves[7:0]), .value(fraction));
  wire [4:0] whole;
  delay #(.WIDTH(5), .CYCLES(2)) wait_rom (.clk, .in(octaves[12:8]), .out(whole));
  reg [2:0] valids, lasts;
  reg [24:0] total;                      // 2^13 to 2^24
  reg normalising;
  reg [2:0] waited;
  assign valid = valids[2];
  assign last = lasts[2];
  always_ff @(posedge clk) begin
    valids <= rst ? '0 : {valids[1:0], octaves_valid};
    lasts <= {lasts[1:0], octaves_last};
    weight <= 14'(fraction[13:0] >> whole);
    done <= waited == 3'd7;
    if (rst) begin
      normalising <= 1'b0; waited <= '0;
    end else if (start) total <= '0;
    else if (valid) begin
      total <= total + 25'(weight);
      exponent <= 5'd24;
      if (last) normalising <= 1'b1;
    end else if (normalising) begin
      if (total[24]) begin
        normalising <= 1'b0; waited <= 3'd1;
      end else begin
        total <= {total[23:0], 1'b0};
        exponent <= exponent - 5'd1;
      end
    end else if (waited != 0) waited <= waited + 3'd1;
  end

  wire signed [18:0] base, inverse_wide;
  wire signed [12:0] delta;
  rom_reciprocal table_reciprocal (.clk, .address(total[23:17]), .base, .delta);
  interpolate #(.BITS(8)) interpolation (.clk, .fraction(total[16:9]), .base, .delta, .out(inverse_wide));
  assign inverse = inverse_wide[16:0];
endmodule
