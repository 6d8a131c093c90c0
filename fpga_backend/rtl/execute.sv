// Takes commands from the queue one at a time, starts what they need and waits until it is done.
module execute #(parameter int COUNTERS = 10) (
  input  wire                   clk,
  input  wire                   rst,
  input  wire                   doorbell,      // counters begin anew
  input  wire                   running,       // a run is going on
  input  wire                   queue_valid,
  output wire                   queue_pop,
  input  wire [255:0]           queue_command,
  output reg  [255:0]           command,       // the one in execution
  output reg                    start,         // a pulse, in the third cycle of `command`
  input  wire                   unit_done,     // a pulse: the last result is where it belongs
  input  wire                   merge_busy,    // rows of padding are still on their way
  output reg                    token_done,    // a pulse: END
  output reg                    store_done,    // a pulse: a command that writes to the cache
  output wire                   active,
  output reg  [31:0]            executed,      // commands of this token
  output wire [COUNTERS*32-1:0] cycles         // by opcode; 0: between commands
);
  localparam logic [2:0] IDLE = 3'd0, DECODE = 3'd1, SETTLE = 3'd2, START = 3'd3, RUN = 3'd4, DRAIN = 3'd5;
  reg [2:0] state;
  wire [3:0] opcode = command[draft_pkg::OPCODE_AT +: draft_pkg::OPCODE_BITS];
  wire [2:0] sink = command[draft_pkg::SINK_AT +: draft_pkg::SINK_BITS];
  wire stores = (opcode == draft_pkg::OP_LINEAR || opcode == draft_pkg::OP_ROTATE)
    && (sink == draft_pkg::SINK_VALUE || sink == draft_pkg::SINK_KEY);
  assign queue_pop = queue_valid && state == IDLE;
  assign active = state != IDLE;
  always_ff @(posedge clk) begin
    start <= 1'b0; token_done <= 1'b0; store_done <= 1'b0;
    if (queue_pop) command <= queue_command;
    if (rst) begin
      state <= IDLE; executed <= '0;
    end else case (state)
      IDLE: if (queue_valid) state <= DECODE;
      DECODE:
        if (opcode == draft_pkg::OP_END) begin
          token_done <= 1'b1; executed <= '0; state <= IDLE;
        end else state <= SETTLE;
      SETTLE: begin
        start <= 1'b1; state <= START;
      end
      START: state <= RUN;
      RUN: if (unit_done) state <= DRAIN;
      DRAIN: if (!merge_busy) begin
        store_done <= stores; executed <= executed + 32'd1; state <= IDLE;
      end
      default: state <= IDLE;
    endcase
  end

  reg [COUNTERS-1:0] counts;
  genvar c;
  generate
    for (c = 0; c < COUNTERS; c++) begin : counter
      reg [31:0] count;
      always_ff @(posedge clk) begin
        counts[c] <= c == 0 ? running && (!active || opcode == draft_pkg::OP_END) : active && opcode == 4'(c);
        if (doorbell) count <= '0;
        else if (counts[c]) count <= count + 32'd1;
      end
      assign cycles[32*c +: 32] = count;
    end
  endgenerate
endmodule
