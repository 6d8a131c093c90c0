// Bytes of keys or values of one token to their places in the cache (program.py, CachePlan).
//   key:   head + slot / ENGINES * row_beats + channel / LANES, lane channel mod LANES, engine slot mod ENGINES
//   value: head + slot / LANES * unit + channel / ENGINES,      lane slot mod LANES,    engine channel mod ENGINES
module store #(parameter int LANES = 64, parameter int ENGINES = 1, localparam int LANE_BITS = $clog2(LANES)) (
  input  wire                 clk,
  input  wire                 start,
  input  wire                 is_key,
  input  wire [31:0]          base,          // beats: this sequence and layer, engine 0
  input  wire [31:0]          engine_stride, // beats
  input  wire [15:0]          stride,        // beats from head to head
  input  wire [9:0]           head,          // channels
  input  wire [9:0]           row_beats,
  input  wire [15:0]          unit,
  input  wire [15:0]          slot,
  input  wire                 valid,         // not in the first six cycles after start
  input  wire [7:0]           value,
  output reg                  push,
  output reg  [31:0]          push_address,
  output reg  [LANE_BITS-1:0] push_lane,
  output reg  [7:0]           push_byte
);
  localparam int ENGINE_BITS = $clog2(ENGINES);
  localparam int TURN_BITS = ENGINES > 1 ? ENGINE_BITS : 1;
  // The place of the slot in the first head.
  reg [15:0] row, pitch;
  reg [31:0] offset;
  reg [5:1] setup;
  always_ff @(posedge clk) begin
    setup <= {setup[4:1], start};
    row <= is_key ? slot >> ENGINE_BITS : slot >> LANE_BITS;
    pitch <= is_key ? 16'(row_beats) : unit;
    offset <= row * pitch;
  end
  reg [31:0] head_at, at;
  reg [9:0] channel;
  reg [LANE_BITS-1:0] lane;
  reg [TURN_BITS-1:0] turn;
  reg [9:0] head_last;
  always_ff @(posedge clk) head_last <= head - 10'd1;
  wire head_end = channel == head_last;
  wire row_end = is_key ? lane == LANE_BITS'(LANES - 1) : turn == TURN_BITS'(ENGINES - 1);
  always_ff @(posedge clk)
    if (setup[3]) head_at <= base + offset;
    else if (setup[4]) begin
      at <= head_at; head_at <= head_at + 32'(stride); channel <= '0;
      lane <= is_key ? '0 : slot[LANE_BITS-1:0];
      turn <= is_key && ENGINES > 1 ? slot[TURN_BITS-1:0] : '0;
    end else if (valid) begin
      channel <= head_end ? '0 : channel + 10'd1;
      if (is_key) lane <= head_end ? '0 : lane + 1'b1;
      else turn <= head_end || row_end ? '0 : turn + 1'b1;
      if (head_end) begin
        at <= head_at; head_at <= head_at + 32'(stride);
      end else if (row_end) at <= at + 32'd1;
    end

  // Where the engine's part of the cache begins.
  wire [31:0] engine_base [0:ENGINES-1];
  assign engine_base[0] = '0;
  genvar e;
  generate
    for (e = 1; e < ENGINES; e++) begin : bases
      reg [31:0] sum;
      always_ff @(posedge clk) sum <= engine_base[e-1] + engine_stride;
      assign engine_base[e] = sum;
    end
  endgenerate
  reg valid_held;
  reg [31:0] at_held, engine_held;
  reg [LANE_BITS-1:0] lane_held;
  reg [7:0] value_held;
  always_ff @(posedge clk) begin
    valid_held <= valid; at_held <= at; lane_held <= lane; value_held <= value;
    engine_held <= engine_base[turn];
    push <= valid_held; push_address <= at_held + engine_held; push_lane <= lane_held; push_byte <= value_held;
  end
endmodule
