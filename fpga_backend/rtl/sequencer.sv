// Runs the command list for token after token. It asks memory for the stream of each command and hands the command
// to a queue: the units behind it work on one command while the data of the next ones is on its way.
module sequencer #(
  parameter int LANES = 64,
  parameter int ENGINES = 1,
  parameter int CONTEXT = 2048,
  parameter int COMMANDS = 1024,
  localparam int LANE_BITS = $clog2(LANES)
) (
  input  wire                  clk,
  input  wire                  rst,
  input  wire                  doorbell,
  // Registers; bases and strides in beats
  input  wire [31:0]           commands_base,
  input  wire [31:0]           commands_count,
  input  wire [31:0]           weights_base,
  input  wire [31:0]           weights_stride,
  input  wire [31:0]           cache_base,
  input  wire [31:0]           cache_stride,
  input  wire [31:0]           tokens_base,
  input  wire [31:0]           stops_base,
  input  wire [31:0]           first_position,
  input  wire [31:0]           known_length,
  input  wire [31:0]           limit,
  // Requests to the fetch of each engine
  output reg  [ENGINES-1:0]    request,
  output reg  [ENGINES*32-1:0] request_address,
  output reg  [31:0]           request_beats,
  input  wire [ENGINES-1:0]    fetch_ready,
  input  wire                  reads_pending,
  input  wire                  read_failed,
  // Stream of engine 0: commands, tokens and the stop mask
  input  wire                  stream_valid,
  output wire                  stream_pop,
  input  wire [LANES*8-1:0]    stream_data,
  // Queue of commands
  output reg                   queue_push,
  output reg  [255:0]          queue_command,
  input  wire                  queue_room,
  input  wire                  token_done,     // END was executed
  input  wire                  store_done,     // a command that writes to the cache was executed
  input  wire [19:0]           chosen,
  // Bytes of the chosen token
  output reg                   write_push,
  output reg  [31:0]           write_address,
  output reg  [LANE_BITS-1:0]  write_lane,
  output reg  [7:0]            write_byte,
  input  wire                  write_room,
  input  wire                  writes_pending,
  input  wire                  write_failed,
  // State
  output reg  [15:0]           position,
  output reg  [15:0]           length,
  output reg  [15:0]           computed,
  output reg                   busy,
  output reg                   done,
  output reg                   stopped,
  output reg  [3:0]            error,
  output reg  [3:0]            state,
  output wire                  fenced
);
  localparam int COMMAND_BITS = $clog2(COMMANDS);
  localparam int PARTS = LANES < 32 ? 32 / LANES : 1;  // beats of a command
  localparam int WORD_BITS = LANE_BITS - 2;

  // Checks of the registers, which are stable by the time of the doorbell.
  reg bad_range, bad_count;
  always_ff @(posedge clk) begin
    bad_range <= first_position >= known_length || known_length > limit || limit > 32'(CONTEXT);
    bad_count <= commands_count == 0 || commands_count > 32'(COMMANDS);
  end

  // The list, on the chip.
  reg list_write;
  reg [COMMAND_BITS-1:0] list_address;
  reg [255:0] list_data;
  reg [COMMAND_BITS:0] at;                   // next command to issue
  wire [255:0] read_command;
  ram #(.WIDTH(256), .DEPTH(COMMANDS)) list (
    .clk, .write(list_write), .write_address(list_address), .write_data(list_data), .address(at[COMMAND_BITS-1:0]),
    .data(read_command));
  wire [255:0] assembled;
  generate
    if (LANES < 32) begin : assemble
      assign assembled = {stream_data, list_data[255:LANES*8]};
    end else begin : whole
      assign assembled = stream_data[255:0];
    end
  endgenerate

  // Bases of each engine.
  wire [31:0] weights_of [0:ENGINES-1];
  wire [31:0] cache_of [0:ENGINES-1];
  assign weights_of[0] = weights_base;
  assign cache_of[0] = cache_base;
  genvar e;
  generate
    for (e = 1; e < ENGINES; e++) begin : bases
      reg [31:0] weights_sum, cache_sum;
      always_ff @(posedge clk) begin
        weights_sum <= weights_of[e-1] + weights_stride;
        cache_sum <= cache_of[e-1] + cache_stride;
      end
      assign weights_of[e] = weights_sum;
      assign cache_of[e] = cache_sum;
    end
  endgenerate

  reg [255:0] command;
  wire [3:0] opcode = command[draft_pkg::OPCODE_AT +: draft_pkg::OPCODE_BITS];
  wire choosing_only = command[draft_pkg::CHOOSING_AT];
  wire [2:0] sink = command[draft_pkg::SINK_AT +: draft_pkg::SINK_BITS];
  wire [1:0] index = command[draft_pkg::INDEX_AT +: draft_pkg::INDEX_BITS];
  wire is_end = opcode == draft_pkg::OP_END;
  wire is_unknown = opcode > draft_pkg::OP_PRODUCT;
  wire is_load = opcode == draft_pkg::OP_LOAD;
  wire is_linear = opcode == draft_pkg::OP_LINEAR;
  wire is_scores = opcode == draft_pkg::OP_SCORES;
  wire is_values = opcode == draft_pkg::OP_VALUES;
  wire has_stream = is_load || is_linear || is_scores || is_values;
  wire of_cache = is_scores || is_values;
  wire stores = (is_linear || opcode == draft_pkg::OP_ROTATE) && (sink == draft_pkg::SINK_VALUE || sink == draft_pkg::SINK_KEY);

  reg [19:0] token;
  reg choosing, in_hand;                     // in_hand: the next token is known without memory
  reg [2:0] step;
  reg [7:0] list_part;
  reg [COMMAND_BITS:0] list_left;
  reg [31:0] word;
  reg [31:0] base_0, offset;
  reg [19:0] factor;
  reg [15:0] pitch;
  reg [27:0] product_low, product_high;
  reg [31:0] product;
  reg [3:0] stores_pending;
  reg fence_open;
  wire [15:0] next_position = position + 16'd1;
  wire [31:0] slots = 32'(position) >> $clog2(ENGINES);

  // A cycle late at both ends: what was asked for comes later than that, and nothing else comes.
  reg listening;
  assign stream_pop = stream_valid && listening;
  wire issuing = state == draft_pkg::STATE_ISSUE && step == 3'd6;
  assign fenced = issuing && is_scores && !fence_open;
  wire issue = issuing && queue_room && (!has_stream || &fetch_ready) && (!is_scores || fence_open) && request == 0;

  task automatic fail(input logic [3:0] why);
    if (error == draft_pkg::ERROR_NONE) error <= why;
  endtask

  always_ff @(posedge clk) begin
    list_write <= 1'b0; queue_push <= 1'b0; write_push <= 1'b0; request <= '0; done <= 1'b0;
    listening <= state == draft_pkg::STATE_LIST || (state == draft_pkg::STATE_TOKEN && step == 0)
      || (state == draft_pkg::STATE_STOP && step == 0);
    fence_open <= stores_pending == 0 && !writes_pending && !store_done;
    product_low <= factor[11:0] * pitch;
    product_high <= factor[19:12] * pitch;
    product <= 32'(product_low) + {product_high[19:0], 12'd0};
    if (list_write) list_address <= list_address + 1'b1;

    if (rst) begin
      state <= draft_pkg::STATE_IDLE; busy <= 1'b0; stopped <= 1'b0; error <= draft_pkg::ERROR_NONE;
      stores_pending <= '0; position <= '0; length <= '0; computed <= '0; step <= '0;
    end else begin
      stores_pending <= stores_pending + 4'(issue && stores && !(choosing_only && !choosing)) - 4'(store_done);
      case (state)
        draft_pkg::STATE_IDLE: if (doorbell) begin
          busy <= 1'b1; stopped <= 1'b0; in_hand <= 1'b0; list_address <= '0; list_part <= '0;
          position <= first_position[15:0]; length <= known_length[15:0]; computed <= first_position[15:0];
          list_left <= commands_count[COMMAND_BITS:0];
          error <= bad_range ? draft_pkg::ERROR_RANGE : bad_count ? draft_pkg::ERROR_COMMANDS : draft_pkg::ERROR_NONE;
          state <= bad_range || bad_count ? draft_pkg::STATE_FINISH : draft_pkg::STATE_LIST_REQUEST;
        end

        draft_pkg::STATE_LIST_REQUEST: begin
          request[0] <= 1'b1; request_address[31:0] <= commands_base; request_beats <= 32'(list_left) * PARTS;
          state <= draft_pkg::STATE_LIST;
        end
        draft_pkg::STATE_LIST: begin
          if (stream_pop) begin
            list_data <= assembled;
            list_part <= list_part == 8'(PARTS - 1) ? '0 : list_part + 8'd1;
            if (list_part == 8'(PARTS - 1)) begin
              list_write <= 1'b1; list_left <= list_left - 1'b1;
              if (list_left == 1) state <= draft_pkg::STATE_TOKEN_REQUEST;
            end
          end
        end

        draft_pkg::STATE_TOKEN_REQUEST: begin
          choosing <= position + 16'd1 == length && limit[15:0] != length;
          at <= '0; step <= '0;
          if (in_hand) state <= draft_pkg::STATE_ISSUE_READ;
          else begin
            request[0] <= 1'b1; request_address[31:0] <= tokens_base + 32'(position >> WORD_BITS); request_beats <= 32'd1;
            state <= draft_pkg::STATE_TOKEN;
          end
        end
        draft_pkg::STATE_TOKEN:
          if (step == 0) begin
            word <= stream_data[{position[WORD_BITS-1:0], 5'd0} +: 32];
            if (stream_pop) step <= 3'd1;
          end else begin
            token <= word[19:0]; step <= '0; state <= draft_pkg::STATE_ISSUE_READ;
          end

        draft_pkg::STATE_ISSUE_READ: begin
          command <= read_command;
          step <= step == 3'd3 ? '0 : step + 3'd1;
          if (step == 3'd3) state <= draft_pkg::STATE_ISSUE;
        end
        draft_pkg::STATE_ISSUE: begin
          case (step)
            3'd0: begin
              factor <= is_scores ? 20'(slots) + 20'd1 : is_values ? 20'(position >> LANE_BITS) + 20'd1
                : index == draft_pkg::INDEX_TOKEN ? token : 20'(position);
              pitch <= is_scores ? 16'(command[draft_pkg::ROW_BEATS_AT +: draft_pkg::ROW_BEATS_BITS])
                : is_values ? command[draft_pkg::UNIT_AT +: draft_pkg::UNIT_BITS]
                : index == draft_pkg::INDEX_NONE ? '0 : command[draft_pkg::STRIDE_AT +: draft_pkg::STRIDE_BITS];
            end
            3'd3: begin
              offset <= command[draft_pkg::ADDRESS_AT +: 32] + (is_load ? product : 32'd0);
              if (of_cache) command[draft_pkg::BEATS_AT +: 32] <= product;
            end
            3'd4: begin
              for (int i = 0; i < ENGINES; i++)
                request_address[32*i +: 32] <= (of_cache ? cache_of[i] : weights_of[i]) + offset;
              request_beats <= command[draft_pkg::BEATS_AT +: 32];
              queue_command <= command;
            end
            default: ;
          endcase
          if (step != 3'd6) step <= choosing_only && !choosing ? 3'd6 : step + 3'd1;
          else if (choosing_only && !choosing && !is_end) begin
            at <= at + 1'b1; step <= '0; state <= draft_pkg::STATE_ISSUE_READ;
          end else if (issue) begin
            request <= is_load ? ENGINES'(1) : has_stream ? '1 : '0;
            queue_push <= 1'b1;
            at <= at + 1'b1; step <= '0;
            state <= is_end ? draft_pkg::STATE_DRAIN : draft_pkg::STATE_ISSUE_READ;
            if (is_unknown || (!is_end && at == commands_count[COMMAND_BITS:0] - 1'b1)) begin
              fail(is_unknown ? draft_pkg::ERROR_OPCODE : draft_pkg::ERROR_COMMANDS);
              queue_command[draft_pkg::OPCODE_AT +: 4] <= draft_pkg::OP_END;
              request <= '0;
              state <= draft_pkg::STATE_DRAIN;
            end
          end
        end
        draft_pkg::STATE_DRAIN: begin
          step <= '0;
          if (token_done) begin
            computed <= next_position;
            state <= choosing && error == draft_pkg::ERROR_NONE ? draft_pkg::STATE_CHOSEN : draft_pkg::STATE_NEXT;
          end
        end

        draft_pkg::STATE_CHOSEN: if (write_room) begin
          token <= chosen;
          write_push <= 1'b1;
          write_address <= tokens_base + 32'(next_position >> WORD_BITS);
          write_lane <= {next_position[WORD_BITS-1:0], step[1:0]};
          write_byte <= step == 0 ? chosen[7:0] : step == 3'd1 ? chosen[15:8] : step == 3'd2 ? {4'd0, chosen[19:16]} : 8'd0;
          step <= step + 3'd1;
          if (step == 3'd3) begin
            step <= '0; length <= length + 16'd1; in_hand <= 1'b1;
            state <= draft_pkg::STATE_STOP_REQUEST;
          end
        end
        draft_pkg::STATE_STOP_REQUEST: begin
          request[0] <= 1'b1; request_address[31:0] <= stops_base + 32'(token >> (LANE_BITS + 3)); request_beats <= 32'd1;
          state <= draft_pkg::STATE_STOP;
        end
        draft_pkg::STATE_STOP:
          if (step == 0) begin
            word <= stream_data[{token[LANE_BITS+2:5], 5'd0} +: 32];
            if (stream_pop) step <= 3'd1;
          end else begin
            stopped <= word[token[4:0]]; step <= '0; state <= draft_pkg::STATE_NEXT;
          end

        draft_pkg::STATE_NEXT: begin
          position <= next_position;
          state <= stopped || error != draft_pkg::ERROR_NONE || next_position == length
            || (choosing && length == limit[15:0]) ? draft_pkg::STATE_FINISH : draft_pkg::STATE_TOKEN_REQUEST;
        end
        draft_pkg::STATE_FINISH: begin
          step <= step + 3'd1;
          if (step == 3'd7) begin
            step <= 3'd7;
            if (!reads_pending && !writes_pending) begin
              state <= draft_pkg::STATE_IDLE; busy <= 1'b0; done <= 1'b1; step <= '0;
            end
          end
        end
        default: state <= draft_pkg::STATE_IDLE;
      endcase
      if (read_failed) fail(draft_pkg::ERROR_READ);
      if (write_failed) fail(draft_pkg::ERROR_WRITE);
    end
  end
endmodule
