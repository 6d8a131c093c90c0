// Dot products of int8 rows from a stream with a vector in input memory: LANES products a cycle. The pipeline never
// stalls: a row enters it only when its result is sure of a place in the FIFO behind.
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
  localparam int LEVELS = $clog2(LANES);
  localparam int DEPTH = 32;
  localparam int SUM = 21 + LEVELS;           // |int8 * 2^13| < 2^20

  // Walk through the stream.
  reg active, in_header, credit;
  reg [19:0] rows_left;
  reg [9:0] beat, row_last;
  reg [$clog2(GROUP)-1:0] place;
  reg [15:0] held, hold_last;
  reg holds;
  reg [INPUT_BITS-1:0] at;
  reg [LANES*8-1:0] header;
  wire take = valid && active && credit;
  wire is_row = take && !in_header;
  reg last_beat, one_beat;          // `beat` is the last of its row; rows have one beat
  wire row_end = is_row && last_beat;
  assign pop = take;
  assign starved = active && credit && !valid;

  always_ff @(posedge clk) begin
    row_last <= row_beats - 10'd1; one_beat <= row_beats == 10'd1; hold_last <= hold - 16'd1; holds <= hold != 0;
    if (take && in_header) header <= data;
    else if (row_end) header <= header >> 32;
    if (start) begin
      rows_left <= rows; beat <= '0; last_beat <= one_beat; place <= '0; held <= '0; at <= source; in_header <= headers;
    end else if (take && in_header) in_header <= 1'b0;
    else if (is_row) begin
      beat <= last_beat ? '0 : beat + 10'd1;
      last_beat <= one_beat || (!last_beat && beat + 10'd1 == row_last);
      if (holds) begin
        held <= held == hold_last ? '0 : held + 16'd1;
        if (held == hold_last) at <= at + 1'b1;
      end else at <= last_beat ? source : at + 1'b1;
      if (last_beat) begin
        rows_left <= rows_left - 20'd1;
        place <= place == ($clog2(GROUP))'(GROUP - 1) ? '0 : place + 1'b1;
        in_header <= headers && place == ($clog2(GROUP))'(GROUP - 1);
      end
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

  // Weights and inputs, products, tree of sums: one register after each.
  wire [LANES*15-1:0] inputs;
  ram #(.WIDTH(LANES*15), .DEPTH(INPUTS)) input_memory (
    .clk, .write, .write_address, .write_data, .address(at), .data(inputs));
  reg [LANES*8-1:0] weights_early, weights;
  always_ff @(posedge clk) begin
    weights_early <= data;
    weights <= weights_early;
  end
  wire signed [SUM-1:0] node [1:2*LANES-1];
  genvar g;
  generate
    for (g = 0; g < LANES; g++) begin : lane
      wire signed [7:0] weight = weights[8*g +: 8];
      wire signed [14:0] factor = inputs[15*g +: 15];
      reg signed [20:0] product, product_late;
      always_ff @(posedge clk) begin
        product <= weight * factor;
        product_late <= product;
      end
      assign node[LANES+g] = SUM'(product_late);
    end
    for (g = 1; g < LANES; g++) begin : tree
      reg signed [SUM-1:0] sum;
      always_ff @(posedge clk) sum <= node[2*g] + node[2*g+1];
      assign node[g] = sum;
    end
  endgenerate

  localparam int LATENCY = 4 + LEVELS;
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
