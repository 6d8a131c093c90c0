// Takes results from the engines in turn: row r comes from engine r mod ENGINES. Rows of padding are dropped.
module merge #(parameter int ENGINES = 1) (
  input  wire                  clk,
  input  wire                  rst,
  input  wire                  start,
  input  wire [19:0]           rows,          // without padding, more than 0
  input  wire [19:0]           engine_rows,   // of each engine
  input  wire                  ready,         // may a result be taken
  input  wire [ENGINES-1:0]    result_valid,
  output wire [ENGINES-1:0]    result_pop,
  input  wire [ENGINES*32-1:0] result_sum,
  input  wire [ENGINES*20-1:0] result_requantiser,
  output reg                   valid,
  output reg                   last,
  output reg signed [31:0]     sum,
  output reg [14:0]            multiplier,
  output reg [4:0]             shift,
  output wire                  busy
);
  localparam int BITS = ENGINES > 1 ? $clog2(ENGINES) : 1;
  reg [BITS-1:0] turn;
  reg [19:0] rows_left, rounds;
  reg taking, some_left;
  wire take = taking && ready && result_valid[turn];
  wire last_turn = turn == BITS'(ENGINES - 1);
  assign busy = taking;
  assign result_pop = take ? ENGINES'(1) << turn : '0;
  always_ff @(posedge clk) begin
    sum <= result_sum[turn*32 +: 32];
    {shift, multiplier} <= result_requantiser[turn*20 +: 20];
    valid <= take && some_left && !rst;
    last <= rows_left == 20'd1;  // counts on below 0 in rows of padding, which are not valid
    if (rst) begin
      taking <= 1'b0; turn <= '0;
    end else if (start) begin
      rounds <= engine_rows; rows_left <= rows; turn <= '0; taking <= 1'b1; some_left <= 1'b1;
    end else if (take) begin
      turn <= last_turn ? '0 : turn + 1'b1;
      if (last_turn) rounds <= rounds - 20'd1;
      if (last_turn && rounds == 20'd1) taking <= 1'b0;
      rows_left <= rows_left - 20'd1;
      if (rows_left == 20'd1) some_left <= 1'b0;
    end
  end
endmodule
