// Dot products of rows from a stream with a vector in input memory. A beat holds LANES weights of 8 bits, or twice as
// many of 4 bits, and all its products are made in one cycle. The pipeline never stalls: a row enters it only when its
// result is sure of a place in the FIFO behind.
//
// Weights of 4 bits: byte i of a beat has the weight of input i in its lower half and that of input LANES + i in its
// upper half. Sums over 32 inputs are multiplied by the scale of their group. Scales come in a beat of their own before
// every 16 beats of weights.
module engine #(
  parameter int LANES = 64,
  parameter int INPUTS = 128,                 // words of input memory
  localparam int INPUT_BITS = $clog2(INPUTS)
) (
  input  wire                   clk,
  input  wire                   rst,
  // Configuration, stable from `start` to the last result
  input  wire                   start,
  input  wire [19:0]            rows,
  input  wire [9:0]             row_beats,
  input  wire [INPUT_BITS-1:0]  source,       // first word of the vector
  input  wire                   headers,      // a header beat before every LANES / 4 rows
  input  wire                   grouped,      // weights of 4 bits
  input  wire [15:0]            hold,         // not 0: a word of the vector serves so many rows of one beat
  // Input memory
  input  wire                   write,
  input  wire [INPUT_BITS-1:0]  write_address,
  input  wire [LANES*15-1:0]    write_data,
  // Stream
  input  wire                   valid,
  output wire                   pop,
  input  wire [LANES*8-1:0]     data,
  output wire                   starved,
  // Results
  output wire                   result_valid,
  input  wire                   result_pop,
  output wire signed [31:0]     result_sum,
  output wire [19:0]            result_requantiser  // shift 5, multiplier 15
);
  localparam int GROUP = LANES / 4;
  localparam int LEAVES = 2 * LANES;
  localparam int LEVELS = $clog2(LEAVES);
  localparam int GROUPS = LEAVES / 32;        // groups of a beat
  localparam int DEPTH = 32;
  localparam int SUM = 21 + LEVELS;           // |int8 * 2^13| < 2^20; a scaled group of 32 has 24 bits

  // Walk through the stream.
  reg active, in_header, in_scales, credit;
  reg [19:0] rows_left;
  reg [9:0] beat, row_last;
  reg [$clog2(GROUP)-1:0] place;
  reg [15:0] held, hold_last;
  reg holds;
  reg [INPUT_BITS-1:0] at;
  reg [LANES*8-1:0] header, scales;
  reg [3:0] scaled;                 // beats of weights since the last scales
  wire take = valid && active && credit;
  wire is_row = take && !in_header && !in_scales;
  reg last_beat, one_beat;          // `beat` is the last of its row; rows have one beat
  wire last_place = place == ($clog2(GROUP))'(GROUP - 1);
  wire header_next = headers && last_beat && last_place;  // after this beat
  wire row_end = is_row && last_beat;
  assign pop = take;
  assign starved = active && credit && !valid;

  always_ff @(posedge clk) begin
    row_last <= row_beats - 10'd1; one_beat <= row_beats == 10'd1; hold_last <= hold - 16'd1; holds <= hold != 0;
    if (take && in_header) header <= data;
    else if (row_end) header <= header >> 32;
    if (take && in_scales) scales <= data;  // never while `in_header`
    else if (is_row) scales <= scales >> 8 * GROUPS;
    if (start) begin
      rows_left <= rows; beat <= '0; last_beat <= one_beat; place <= '0; held <= '0; at <= source; in_header <= headers;
      in_scales <= grouped && !headers; scaled <= '0;
    end else if (take && in_header) begin
      in_header <= 1'b0; in_scales <= grouped && scaled == 0;
    end else if (take && in_scales) in_scales <= 1'b0;
    else if (is_row) begin
      scaled <= scaled + 4'd1;
      beat <= last_beat ? '0 : beat + 10'd1;
      last_beat <= one_beat || (!last_beat && beat + 10'd1 == row_last);
      if (holds) begin
        held <= held == hold_last ? '0 : held + 16'd1;
        if (held == hold_last) at <= at + 1'b1;
      end else at <= last_beat ? source : at + (grouped ? INPUT_BITS'(2) : INPUT_BITS'(1));
      if (last_beat) begin
        rows_left <= rows_left - 20'd1;
        place <= last_place ? '0 : place + 1'b1;
      end
      in_header <= header_next;
      in_scales <= grouped && scaled == 4'd15 && !header_next;
    end
    if (rst) active <= 1'b0;
    else if (start) active <= rows != 0;
    else if (row_end && rows_left == 20'd1) active <= 1'b0;
  end

  // Rows that are on their way or wait in the FIFO.
  reg [5:0] used;
  always_ff @(posedge clk) begin
    credit <= used < 6'(DEPTH - 3);
    if (rst) used <= '0;
    else used <= used + 6'(row_end) - 6'(result_pop);
  end

  // Even and odd words of the input memory; weights of 4 bits take one of each.
  wire [LANES*15-1:0] even, odd;
  wire take_odd;
  ram #(.WIDTH(LANES*15), .DEPTH(INPUTS/2)) even_inputs (
    .clk, .write(write && !write_address[0]), .write_address(write_address[INPUT_BITS-1:1]), .write_data,
    .address(at[INPUT_BITS-1:1]), .data(even));
  ram #(.WIDTH(LANES*15), .DEPTH(INPUTS/2)) odd_inputs (
    .clk, .write(write && write_address[0]), .write_address(write_address[INPUT_BITS-1:1]), .write_data,
    .address(at[INPUT_BITS-1:1]), .data(odd));
  delay #(.WIDTH(1), .CYCLES(2)) wait_inputs (.clk, .in(at[0] && !grouped), .out(take_odd));
  reg [LANES*8-1:0] weights_early, weights;
  always_ff @(posedge clk) begin
    weights_early <= data;
    weights <= weights_early;
  end

  // Weights and inputs, products, tree of sums: one register after each, two after each product.
  wire signed [SUM-1:0] node [1:2*LEAVES-1];
  wire [8*GROUPS-1:0] scale;
  delay #(.WIDTH(8*GROUPS), .CYCLES(10)) wait_sums (.clk, .in(scales[8*GROUPS-1:0]), .out(scale));
  genvar g;
  generate
    for (g = 0; g < LANES; g++) begin : lane
      reg signed [7:0] weight, second_factor;
      reg signed [3:0] second_weight;
      reg signed [14:0] factor;
      reg signed [20:0] product, product_late;
      reg signed [10:0] second_product, second_late;
      always_ff @(posedge clk) begin
        weight <= grouped ? {{4{weights[8*g+3]}}, weights[8*g +: 4]} : weights[8*g +: 8];
        factor <= take_odd ? odd[15*g +: 15] : even[15*g +: 15];
        second_weight <= grouped ? weights[8*g+4 +: 4] : 4'd0;
        second_factor <= odd[15*g +: 8];
        product <= weight * factor;
        second_product <= second_weight * second_factor;
        product_late <= product; second_late <= second_product;
      end
      assign node[LEAVES+g] = SUM'(product_late);
      assign node[LEAVES+LANES+g] = SUM'(second_late);
    end
    for (g = 1; g < LEAVES; g++) begin : tree
      localparam int BITS = 22 + LEVELS - $clog2(g + 1);
      reg signed [BITS-1:0] sum;
      always_ff @(posedge clk) sum <= BITS'(node[2*g]) + BITS'(node[2*g+1]);
      if (g >= GROUPS && g < 2 * GROUPS) begin : group
        wire signed [15:0] part = sum[15:0];
        wire signed [8:0] factor = {1'b0, scale[8*(g-GROUPS) +: 8]};
        reg signed [24:0] product;
        reg signed [BITS-1:0] sum_late, out;
        always_ff @(posedge clk) begin
          product <= part * factor;
          sum_late <= sum;
          out <= grouped ? BITS'(product) : sum_late;
        end
        assign node[g] = SUM'(out);
      end else begin : plain
        assign node[g] = SUM'(sum);
      end
    end
  endgenerate

  localparam int LATENCY = 7 + LEVELS;
  wire [2:0] tag;                             // valid, first beat of its row, last beat
  delay #(.WIDTH(3), .CYCLES(LATENCY)) tags (.clk, .in({is_row, beat == 0, last_beat}), .out(tag));
  reg signed [31:0] sum;
  reg [LATENCY:0] settled;                    // tags before a reset are not results
  reg push;
  always_ff @(posedge clk) begin
    settled <= rst ? '0 : {settled[LATENCY-1:0], 1'b1};
    if (tag[2]) sum <= (tag[1] ? 32'sd0 : sum) + 32'(node[1]);
    push <= tag[2] && tag[0] && settled[LATENCY];
  end

  wire [5:0] level, requantiser_level;
  wire requantiser_valid;
  fifo #(.WIDTH(32), .DEPTH(DEPTH)) results (
    .clk, .rst, .push, .push_data(sum), .valid(result_valid), .pop(result_pop), .data(result_sum), .level);
  fifo #(.WIDTH(20), .DEPTH(DEPTH)) requantisers (
    .clk, .rst, .push(row_end), .push_data({header[20:16], header[14:0]}), .valid(requantiser_valid), .pop(result_pop),
    .data(result_requantiser), .level(requantiser_level));
endmodule
