// Gumbel noise, Q6.12, of 32 uniform bits: -ln(-ln u) from a table with 24 octaves for each tail; 12 cycles.
module gumbel (
  input  wire               clk,
  input  wire [31:0]        bits,
  output wire signed [18:0] out
);
  // 1, 2: the smaller tail in units of 2^-33, 2^8 at least
  reg high, high_2;
  reg [30:0] tail;
  reg [31:0] w;
  always_ff @(posedge clk) begin
    high <= bits[31]; tail <= bits[31] ? ~bits[30:0] : bits[30:0];
    high_2 <= high; w <= tail < 31'd128 ? 32'd256 : {tail, 1'b1};
  end
  // 3 to 7: shifted up until its upper bit is set
  reg [31:0] w16, w8, w4, w2, w1;
  reg [4:0] up16, up8, up4, up2, up1;
  always_ff @(posedge clk) begin
    w16 <= w[31:16] == 0 ? {w[15:0], 16'd0} : w;           up16 <= w[31:16] == 0 ? 5'd16 : 5'd0;
    w8 <= w16[31:24] == 0 ? {w16[23:0], 8'd0} : w16;       up8 <= up16 + (w16[31:24] == 0 ? 5'd8 : 5'd0);
    w4 <= w8[31:28] == 0 ? {w8[27:0], 4'd0} : w8;          up4 <= up8 + (w8[31:28] == 0 ? 5'd4 : 5'd0);
    w2 <= w4[31:30] == 0 ? {w4[29:0], 2'd0} : w4;          up2 <= up4 + (w4[31:30] == 0 ? 5'd2 : 5'd0);
    w1 <= !w2[31] ? {w2[30:0], 1'b0} : w2;                 up1 <= 5'd23 - (up2 + (!w2[31] ? 5'd1 : 5'd0));
  end
  wire high_7;
  delay #(.WIDTH(1), .CYCLES(5)) wait_shift (.clk, .in(high_2), .out(high_7));
  // 8 to 12: table
  wire signed [18:0] base;
  wire signed [12:0] delta;
  rom_gumbel table_gumbel (.clk, .address({high_7, up1, w1[30:26]}), .base, .delta);
  interpolate #(.BITS(8)) interpolation (.clk, .fraction(w1[25:18]), .base, .delta, .out);
endmodule
