// RoPE: heads of int16 in vector memory to int8. Element c of the first half of a head is a*cos - b*sin, the one half
// a head further b*cos + a*sin, where a and b are the elements of the pair.
module rotate #(parameter int VECTOR_BITS = 12) (
  input  wire                   clk,
  input  wire                   rst,
  input  wire                   start,
  input  wire [19:0]            rows,
  input  wire [9:0]             head,          // elements of a head
  input  wire [VECTOR_BITS-1:0] source,
  input  wire [15:0]            turn,          // byte of parameter memory: cosine, sine of each pair
  input  wire                   ready,         // elements may enter the pipeline
  output reg  [VECTOR_BITS-1:0] address_a,
  output reg  [VECTOR_BITS-1:0] address_b,
  input  wire signed [15:0]     data_a,
  input  wire signed [15:0]     data_b,
  output reg  [15:0]            parameter_address,
  input  wire [31:0]            parameter_data,
  output wire                   valid,
  output wire                   head_last,
  output wire                   last,
  output reg signed [7:0]       out
);
  localparam int LATENCY = 8;
  // Walk: the pairs of a head twice.
  reg running, second;
  reg [19:0] left;
  reg [8:0] pair;
  reg [VECTOR_BITS-1:0] begin_of_head;
  wire [8:0] half = head[9:1];
  reg [8:0] half_last;
  always_ff @(posedge clk) half_last <= half - 9'd1;
  wire half_end = pair == half_last;
  wire go = running && ready;
  wire [VECTOR_BITS-1:0] next_head = begin_of_head + VECTOR_BITS'(head);
  always_ff @(posedge clk) begin
    if (rst) running <= 1'b0;
    else if (start) running <= 1'b1;
    else if (go && left == 20'd1) running <= 1'b0;
    if (start) begin
      left <= rows; pair <= '0; second <= 1'b0; begin_of_head <= source;
      address_a <= source; address_b <= source + VECTOR_BITS'(half); parameter_address <= turn;
    end else if (go) begin
      left <= left - 20'd1;
      pair <= half_end ? '0 : pair + 9'd1;
      if (!half_end) begin
        address_a <= address_a + 1'b1; address_b <= address_b + 1'b1; parameter_address <= parameter_address + 16'd4;
      end else begin
        second <= !second; parameter_address <= turn;
        address_a <= second ? next_head : begin_of_head;
        address_b <= (second ? next_head : begin_of_head) + VECTOR_BITS'(half);
        if (second) begin_of_head <= next_head;
      end
    end
  end

  reg [LATENCY-1:0] valids, lasts, head_lasts;
  wire second_late;
  delay #(.WIDTH(1), .CYCLES(5)) wait_products (.clk, .in(second), .out(second_late));
  reg signed [15:0] a, b, first_factor, second_factor, cosine, sine;
  reg signed [31:0] first_product, second_product, sum, rounded;
  wire select;
  wire signed [11:0] whole = rounded[31:20];
  always_ff @(posedge clk) begin
    valids <= rst ? '0 : {valids[LATENCY-2:0], go};
    lasts <= {lasts[LATENCY-2:0], left == 20'd1};
    head_lasts <= {head_lasts[LATENCY-2:0], second && half_end};
    // 3: parameters are there, vector data a cycle earlier
    a <= data_a; b <= data_b;
    // 4
    first_factor <= select ? b : a; second_factor <= select ? a : b;
    {sine, cosine} <= parameter_data;
    // 5
    first_product <= first_factor * cosine; second_product <= second_factor * sine;
    // 6, 7, 8
    sum <= second_late ? first_product + second_product : first_product - second_product;
    rounded <= sum + 32'sd524288;
    out <= whole > 12'sd127 ? 8'sd127 : whole < -12'sd127 ? -8'sd127 : whole[7:0];
  end
  delay #(.WIDTH(1), .CYCLES(3)) wait_data (.clk, .in(second), .out(select));
  assign valid = valids[LATENCY-1];
  assign last = lasts[LATENCY-1];
  assign head_last = head_lasts[LATENCY-1];
endmodule
