// SiLU(gate) * up: the two come in turn, int16; their product goes to vector memory and its largest size is kept.
module gate #(parameter int VECTOR_BITS = 12) (
  input  wire                   clk,
  input  wire                   rst,
  input  wire                   start,
  input  wire [VECTOR_BITS-1:0] first,
  input  wire [4:0]             shift,
  input  wire                   valid,
  input  wire                   last,
  input  wire signed [15:0]     value,
  output wire                   write,
  output reg  [VECTOR_BITS-1:0] write_address,
  output wire signed [15:0]     write_data,
  output reg  [3:0]             exponent,       // of the product: max(0, bits of the largest - 7)
  output reg                    done            // a pulse; `exponent` is complete
);
  reg is_up;
  always_ff @(posedge clk)
    if (start) is_up <= 1'b0;
    else if (valid) is_up <= !is_up;

  // Cycles are counted from the one in which the pair is in these registers.
  reg signed [15:0] g, u, g_wait;
  reg pair, pair_last;
  always_ff @(posedge clk) begin
    if (valid && !is_up) g_wait <= value;
    g <= g_wait; u <= value;
    pair <= valid && is_up && !rst; pair_last <= last;
  end
  // 1: size of the gate, below 16; 6: sigmoid of it; 7: sigmoid of the gate
  reg [11:0] size;
  wire [15:0] absolute = g[15] ? 16'(-g) : 16'(g);
  always_ff @(posedge clk) size <= absolute[15:12] != 0 ? 12'hFFF : absolute[11:0];
  wire signed [18:0] base, positive;
  wire signed [12:0] delta;
  rom_sigmoid table_sigmoid (.clk, .address(size[11:4]), .base, .delta);
  interpolate #(.BITS(4)) interpolation (.clk, .fraction(size[3:0]), .base, .delta, .out(positive));
  wire signed [15:0] g_6, g_7, u_14;
  delay #(.WIDTH(16), .CYCLES(6)) wait_sigmoid (.clk, .in(g), .out(g_6));
  delay #(.WIDTH(16), .CYCLES(1)) wait_sign (.clk, .in(g_6), .out(g_7));
  delay #(.WIDTH(16), .CYCLES(14)) wait_silu (.clk, .in(u), .out(u_14));
  reg signed [16:0] sigmoid;
  always_ff @(posedge clk) sigmoid <= g_6[15] ? 17'sd32768 - positive[16:0] : positive[16:0];
  wire pair_7, last_7;
  delay #(.WIDTH(2), .CYCLES(7)) wait_pair (.clk, .in({pair, pair_last}), .out({pair_7, last_7}));

  wire silu_valid, silu_last, product_last;
  wire signed [15:0] silu;
  scale #(.A(16), .B(17), .OUT(16)) to_silu (
    .clk, .rst, .valid(pair_7), .last(last_7), .a(g_7), .b(sigmoid), .shift(5'd15), .limit(15'd32767),
    .out_valid(silu_valid), .out_last(silu_last), .out(silu));
  scale #(.A(16), .B(16), .OUT(16)) to_product (
    .clk, .rst, .valid(silu_valid), .last(silu_last), .a(silu), .b(u_14), .shift, .limit(15'd32767),
    .out_valid(write), .out_last(product_last), .out(write_data));

  // Any bit that a product has set is set here: the highest one is that of the largest.
  reg [14:0] bits;
  reg ending;
  wire [15:0] product_size = write_data[15] ? 16'(-write_data) : 16'(write_data);
  always_ff @(posedge clk) begin
    if (start) write_address <= first;
    else if (write) write_address <= write_address + 1'b1;
    if (start) bits <= '0;
    else if (write) bits <= bits | product_size[14:0];
    exponent <= '0;
    for (int i = 7; i < 15; i++) if (bits[i]) exponent <= 4'(i - 6);
    ending <= write && product_last && !rst;
    done <= ending;
  end
endmodule
