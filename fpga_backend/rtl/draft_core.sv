// The whole core: control slave, sequencer, engines with their memory ports, vector units, cache writer.
module draft_core #(
  parameter int LANES = 64,        // products a cycle of an engine, bytes of a beat
  parameter int ENGINES = 1,
  parameter int VECTOR = 4096,     // int16 elements of vector memory
  parameter int INPUTS = 128,      // words of input memory
  parameter int PARAMETERS = 256,  // beats of parameter memory
  parameter int CONTEXT = 2048,    // tokens
  parameter int COMMANDS = 1024,
  parameter int STREAM = 512,      // beats of the FIFO of each memory port
  localparam int LANE_BITS = $clog2(LANES)
) (
  input  wire                       clk,
  input  wire                       rst,
  output wire                       irq,       // a run is done
  // AXI4-Lite slave
  input  wire                       s_awvalid,
  output wire                       s_awready,
  input  wire [7:0]                 s_awaddr,
  input  wire                       s_wvalid,
  output wire                       s_wready,
  input  wire [31:0]                s_wdata,
  input  wire [3:0]                 s_wstrb,
  output wire                       s_bvalid,
  input  wire                       s_bready,
  output wire [1:0]                 s_bresp,
  input  wire                       s_arvalid,
  output wire                       s_arready,
  input  wire [7:0]                 s_araddr,
  output wire                       s_rvalid,
  input  wire                       s_rready,
  output wire [31:0]                s_rdata,
  output wire [1:0]                 s_rresp,
  // AXI4 read masters, one for each engine, lowest first
  output wire [ENGINES-1:0]         m_arvalid,
  input  wire [ENGINES-1:0]         m_arready,
  output wire [ENGINES*64-1:0]      m_araddr,
  output wire [ENGINES*8-1:0]       m_arlen,
  output wire [2:0]                 m_arsize,
  output wire [1:0]                 m_arburst,
  input  wire [ENGINES-1:0]         m_rvalid,
  output wire [ENGINES-1:0]         m_rready,
  input  wire [ENGINES*LANES*8-1:0] m_rdata,
  input  wire [ENGINES*2-1:0]       m_rresp,
  input  wire [ENGINES-1:0]         m_rlast,
  // AXI4 write master, single beats
  output wire                       m_awvalid,
  input  wire                       m_awready,
  output wire [63:0]                m_awaddr,
  output wire [7:0]                 m_awlen,
  output wire [2:0]                 m_awsize,
  output wire [1:0]                 m_awburst,
  output wire                       m_wvalid,
  input  wire                       m_wready,
  output wire [LANES*8-1:0]         m_wdata,
  output wire [LANES-1:0]           m_wstrb,
  output wire                       m_wlast,
  input  wire                       m_bvalid,
  output wire                       m_bready,
  input  wire [1:0]                 m_bresp
);
  localparam int VECTOR_BITS = $clog2(VECTOR);
  localparam int INPUT_BITS = $clog2(INPUTS);
  localparam int PARAMETER_BITS = $clog2(PARAMETERS);
  localparam int CONTEXT_BITS = $clog2(CONTEXT);
  localparam int OPCODES = 10;
  localparam int COUNTERS = 4 + OPCODES;
  localparam int SETTINGS = 19;
  genvar e;

  // ---- control ------------------------------------------------------------------------------------------------
  wire doorbell_written;
  wire [SETTINGS*32-1:0] settings;
  wire [31:0] setting [0:SETTINGS-1];
  generate
    for (e = 0; e < SETTINGS; e++) begin : split
      assign setting[e] = settings[32*e +: 32];
    end
  endgenerate
  // Addresses and strides are bytes outside and beats inside.
  wire [31:0] commands_base  = 32'({setting[1], setting[0]} >> LANE_BITS);
  wire [31:0] weights_base   = 32'({setting[4], setting[3]} >> LANE_BITS);
  wire [31:0] weights_stride = setting[5] >> LANE_BITS;
  wire [31:0] cache_base     = 32'({setting[7], setting[6]} >> LANE_BITS);
  wire [31:0] cache_stride   = setting[8] >> LANE_BITS;
  wire [31:0] tokens_base    = 32'({setting[10], setting[9]} >> LANE_BITS);
  wire [31:0] stops_base     = 32'({setting[12], setting[11]} >> LANE_BITS);

  wire busy, done, stopped, fenced, active;
  wire [3:0] error, state;
  wire [15:0] position, length, computed;
  wire [31:0] executed;
  wire [OPCODES*32-1:0] opcode_cycles;
  wire doorbell = doorbell_written && !busy;
  reg done_held, reads_pending, stream_empty, queue_room, fenced_held;
  reg [31:0] cycles, beats, starved_cycles, fenced_cycles;
  wire writes_pending;
  wire [255:0] command;
  wire [3:0] opcode = command[draft_pkg::OPCODE_AT +: 4];
  assign irq = done_held;
  wire [31:0] status = {8'd0, active ? opcode : 4'd0, state, 3'd0, busy && !queue_room, stream_empty, fenced_held, writes_pending,
    reads_pending, 4'd0, stopped, error != 0, done_held, busy};
  assign s_bresp = 2'b00;
  assign s_rresp = 2'b00;
  control #(.LANES(LANES), .ENGINES(ENGINES), .VECTOR(VECTOR), .INPUTS(INPUTS), .PARAMETERS(PARAMETERS), .CONTEXT(CONTEXT),
    .COMMANDS(COMMANDS), .COUNTERS(COUNTERS)) registers (
    .clk, .rst, .awvalid(s_awvalid), .awready(s_awready), .awaddr(s_awaddr), .wvalid(s_wvalid), .wready(s_wready),
    .wdata(s_wdata), .wstrb(s_wstrb), .bvalid(s_bvalid), .bready(s_bready), .arvalid(s_arvalid), .arready(s_arready),
    .araddr(s_araddr), .rvalid(s_rvalid), .rready(s_rready), .rdata(s_rdata), .doorbell(doorbell_written), .settings,
    .status, .error(32'(error)), .new_length(32'(length)), .computed(32'(computed)), .position(32'(position)),
    .command(executed), .counters({opcode_cycles, fenced_cycles, starved_cycles, beats, cycles}));

  // ---- memory ports -------------------------------------------------------------------------------------------
  wire [ENGINES-1:0] request, fetch_ready, fetch_pending, fetch_failed, fetch_arrived, stream_valid, stream_pop;
  wire [ENGINES*32-1:0] request_address;
  wire [31:0] request_beats;
  wire [ENGINES*LANES*8-1:0] stream_data;
  assign m_arsize = 3'(LANE_BITS);
  assign m_arburst = 2'b01;
  assign m_rready = '1;
  generate
    for (e = 0; e < ENGINES; e++) begin : port
      wire [31:0] beat_address;
      fetch #(.LANES(LANES), .DEPTH(STREAM)) read_master (
        .clk, .rst, .request(request[e]), .address(request_address[32*e +: 32]), .beats(request_beats), .ready(fetch_ready[e]),
        .valid(stream_valid[e]), .pop(stream_pop[e]), .data(stream_data[LANES*8*e +: LANES*8]), .pending(fetch_pending[e]),
        .failed(fetch_failed[e]), .arrived(fetch_arrived[e]), .arvalid(m_arvalid[e]), .arready(m_arready[e]),
        .araddr(beat_address), .arlen(m_arlen[8*e +: 8]), .rvalid(m_rvalid[e]), .rdata(m_rdata[LANES*8*e +: LANES*8]),
        .rresp(m_rresp[2*e +: 2]));
      assign m_araddr[64*e +: 64] = 64'(beat_address) << LANE_BITS;
    end
  endgenerate

  wire store_push, token_push;
  wire [31:0] store_address, token_address, write_beat;
  wire [LANE_BITS-1:0] store_lane, token_lane;
  wire [7:0] store_byte, token_byte;
  wire write_room, write_failed;
  writer #(.LANES(LANES)) write_master (
    .clk, .rst, .push(store_push || token_push), .push_address(token_push ? token_address : store_address),
    .push_lane(token_push ? token_lane : store_lane), .push_byte(token_push ? token_byte : store_byte), .room(write_room),
    .pending(writes_pending), .failed(write_failed), .awvalid(m_awvalid), .awready(m_awready), .awaddr(write_beat),
    .wvalid(m_wvalid), .wready(m_wready), .wdata(m_wdata), .wstrb(m_wstrb), .bvalid(m_bvalid), .bresp(m_bresp));
  assign m_awaddr = 64'(write_beat) << LANE_BITS;
  assign m_awlen = 8'd0;
  assign m_awsize = 3'(LANE_BITS);
  assign m_awburst = 2'b01;
  assign m_wlast = 1'b1;
  assign m_bready = 1'b1;

  // ---- commands -----------------------------------------------------------------------------------------------
  wire queue_push, queue_valid, queue_pop, token_done, store_done, start, unit_done, merge_busy, sequencer_pop;
  wire [255:0] pushed_command, queue_command;
  wire [4:0] queue_level;
  wire [19:0] chosen;
  sequencer #(.LANES(LANES), .ENGINES(ENGINES), .CONTEXT(CONTEXT), .COMMANDS(COMMANDS)) sequence_commands (
    .clk, .rst, .doorbell, .commands_base, .commands_count(setting[2]), .weights_base, .weights_stride, .cache_base,
    .cache_stride, .tokens_base, .stops_base, .first_position(setting[13]), .known_length(setting[14]), .limit(setting[15]),
    .request, .request_address, .request_beats, .fetch_ready, .reads_pending, .read_failed(|fetch_failed),
    .stream_valid(stream_valid[0]), .stream_pop(sequencer_pop), .stream_data(stream_data[LANES*8-1:0]), .queue_push,
    .queue_command(pushed_command), .queue_room, .token_done, .store_done, .chosen, .write_push(token_push),
    .write_address(token_address), .write_lane(token_lane), .write_byte(token_byte), .write_room, .writes_pending, .write_failed,
    .position, .length, .computed, .busy, .done, .stopped, .error, .state, .fenced);
  fifo #(.WIDTH(256), .DEPTH(16)) queue (
    .clk, .rst, .push(queue_push), .push_data(pushed_command), .valid(queue_valid), .pop(queue_pop), .data(queue_command),
    .level(queue_level));
  execute #(.COUNTERS(OPCODES)) execute_commands (
    .clk, .rst, .doorbell, .running(busy), .queue_valid, .queue_pop, .queue_command, .command, .start, .unit_done, .merge_busy,
    .token_done, .store_done, .active, .executed, .cycles(opcode_cycles));

  wire [2:0]  sink        = command[draft_pkg::SINK_AT +: 3];
  wire        exponent_on = command[draft_pkg::EXPONENT_AT];
  wire [4:0]  headroom    = command[draft_pkg::HEADROOM_AT +: 5];
  wire [15:0] stride      = command[draft_pkg::STRIDE_AT +: 16];
  wire [31:0] stream_beats = command[draft_pkg::BEATS_AT +: 32];
  wire [19:0] rows        = command[draft_pkg::ROWS_AT +: 20];
  wire [9:0]  row_beats   = command[draft_pkg::ROW_BEATS_AT +: 10];
  wire        more        = command[draft_pkg::MORE_AT];
  wire [15:0] source      = command[draft_pkg::SOURCE_AT +: 16];
  wire [15:0] destination = command[draft_pkg::DESTINATION_AT +: 16];
  wire [15:0] gain        = command[draft_pkg::GAIN_AT +: 16];
  wire [4:0]  shift       = command[draft_pkg::SHIFT_AT +: 5];
  wire [9:0]  head        = command[draft_pkg::HEAD_AT +: 10];
  wire [15:0] multiplier  = command[draft_pkg::MULTIPLIER_AT +: 16];
  wire [15:0] unit        = command[draft_pkg::UNIT_AT +: 16];
  wire [31:0] value       = command[draft_pkg::VALUE_AT +: 32];
  // Decoded a cycle after the command is there, well before `start`.
  reg is_grouped, is_load, is_embed, is_norm, is_linear, is_rotate, is_scores, is_softmax, is_values, is_product;
  reg to_vector, to_gate, to_cache, to_choice, to_inputs, adds;
  always_ff @(posedge clk) begin
    is_grouped <= opcode == draft_pkg::OP_LINEAR && command[draft_pkg::GROUPED_AT];
    is_load <= opcode == draft_pkg::OP_LOAD;
    is_embed <= opcode == draft_pkg::OP_EMBED;
    is_norm <= opcode == draft_pkg::OP_NORM;
    is_linear <= opcode == draft_pkg::OP_LINEAR;
    is_rotate <= opcode == draft_pkg::OP_ROTATE;
    is_scores <= opcode == draft_pkg::OP_SCORES;
    is_softmax <= opcode == draft_pkg::OP_SOFTMAX;
    is_values <= opcode == draft_pkg::OP_VALUES;
    is_product <= opcode == draft_pkg::OP_PRODUCT;
    adds <= opcode == draft_pkg::OP_LINEAR && sink == draft_pkg::SINK_RESIDUAL;
    to_vector <= opcode == draft_pkg::OP_EMBED
      || (opcode == draft_pkg::OP_LINEAR && (sink == draft_pkg::SINK_VECTOR || sink == draft_pkg::SINK_RESIDUAL));
    to_gate <= opcode == draft_pkg::OP_LINEAR && sink == draft_pkg::SINK_GATED;
    to_cache <= (opcode == draft_pkg::OP_LINEAR && sink == draft_pkg::SINK_VALUE)
      || (opcode == draft_pkg::OP_ROTATE && sink == draft_pkg::SINK_KEY);
    to_choice <= opcode == draft_pkg::OP_LINEAR && sink == draft_pkg::SINK_LOGIT;
    to_inputs <= opcode == draft_pkg::OP_NORM || (opcode == draft_pkg::OP_ROTATE && sink != draft_pkg::SINK_KEY)
      || opcode == draft_pkg::OP_VALUES || opcode == draft_pkg::OP_PRODUCT;
  end

  // ---- LOAD ---------------------------------------------------------------------------------------------------
  reg [31:0] load_left;
  reg [PARAMETER_BITS-1:0] load_at;
  reg load_done, loading;
  wire load_take = loading && stream_valid[0];
  always_ff @(posedge clk) begin
    load_done <= load_take && load_left == 32'd1;
    if (rst) loading <= 1'b0;
    else if (start && is_load) begin
      loading <= 1'b1; load_left <= stream_beats; load_at <= destination[PARAMETER_BITS-1:0];
    end else if (load_take) begin
      load_left <= load_left - 32'd1; load_at <= load_at + 1'b1;
      if (load_left == 32'd1) loading <= 1'b0;
    end
  end
  wire [15:0] embed_parameter, norm_parameter, rotate_parameter, mean_parameter;
  wire [15:0] parameter_address = is_embed ? embed_parameter : is_norm ? norm_parameter : is_rotate ? rotate_parameter : mean_parameter;
  wire [31:0] parameter_data;
  parameter_memory #(.LANES(LANES), .DEPTH(PARAMETERS)) parameters (
    .clk, .write(load_take), .write_address(load_at), .write_data(stream_data[LANES*8-1:0]), .address(parameter_address),
    .data(parameter_data));

  // ---- engines ------------------------------------------------------------------------------------------------
  // SCORES has a row for each slot, VALUES one for each channel of each block of slots.
  reg [19:0] engine_rows, result_rows;
  reg [11:0] blocks;
  wire of_cache = is_scores || is_values;
  always_ff @(posedge clk) begin
    engine_rows <= is_scores ? 20'(position >> $clog2(ENGINES)) + 20'd1
      : is_values ? stream_beats[19:0] : (rows + 20'(ENGINES - 1)) >> $clog2(ENGINES);
    result_rows <= is_scores ? 20'(position) + 20'd1 : is_values ? stream_beats[19:0] << $clog2(ENGINES) : rows;
    blocks <= 12'(position >> LANE_BITS) + 12'd1;
  end
  wire engine_start = start && (is_linear || of_cache);
  wire [ENGINES-1:0] engine_pop, engine_starved, result_valid, result_pop;
  wire [ENGINES*32-1:0] result_sum;
  wire [ENGINES*20-1:0] result_requantiser;
  wire input_write;
  wire [INPUT_BITS-1:0] input_address;
  wire [LANES*15-1:0] input_data;
  generate
    for (e = 0; e < ENGINES; e++) begin : gemv
      engine #(.LANES(LANES), .INPUTS(INPUTS)) dot_products (
        .clk, .rst, .start(engine_start), .rows(engine_rows), .row_beats(is_values ? 10'd1 : row_beats),
        .source(source[INPUT_BITS-1:0]), .headers(is_linear), .grouped(is_grouped), .hold(is_values ? unit : 16'd0), .write(input_write),
        .write_address(input_address), .write_data(input_data), .valid(stream_valid[e]), .pop(engine_pop[e]),
        .data(stream_data[LANES*8*e +: LANES*8]), .starved(engine_starved[e]), .result_valid(result_valid[e]),
        .result_pop(result_pop[e]), .result_sum(result_sum[32*e +: 32]),
        .result_requantiser(result_requantiser[20*e +: 20]));
      if (e == 0) begin : shared
        assign stream_pop[0] = engine_pop[0] || load_take || sequencer_pop;
      end else begin : own
        assign stream_pop[e] = engine_pop[e];
      end
    end
  endgenerate
  reg results_wanted;  // a cycle late: the writer has room for more than what is on its way
  always_ff @(posedge clk) results_wanted <= !to_cache || write_room;
  wire merged_valid, merged_last;
  wire signed [31:0] merged_sum;
  wire [14:0] merged_multiplier;
  wire [4:0] merged_shift;
  merge #(.ENGINES(ENGINES)) in_turn (
    .clk, .rst, .start(engine_start), .rows(result_rows), .engine_rows, .ready(results_wanted), .result_valid, .result_pop,
    .result_sum, .result_requantiser, .valid(merged_valid), .last(merged_last), .sum(merged_sum), .multiplier(merged_multiplier),
    .shift(merged_shift), .busy(merge_busy));

  // ---- requantiser, shared by LINEAR, EMBED and SOFTMAX ---------------------------------------------------------
  wire embed_valid, embed_last, distance_valid, distance_last;
  wire signed [31:0] embed_sum, distance;
  wire [14:0] embed_multiplier;
  wire [4:0] embed_shift;
  wire [3:0] exponent;
  reg sum_valid, sum_last;
  reg signed [31:0] sum;
  reg [14:0] sum_multiplier;
  reg [4:0] sum_shift;
  reg [22:0] sum_limit;
  always_ff @(posedge clk) begin
    sum_valid <= !rst && ((is_linear && merged_valid) || embed_valid || distance_valid);
    sum_last <= is_embed ? embed_last : is_softmax ? distance_last : merged_last;
    sum <= is_embed ? embed_sum : is_softmax ? distance : merged_sum;
    sum_multiplier <= is_embed ? embed_multiplier : is_softmax ? multiplier[14:0] : merged_multiplier;
    sum_shift <= is_embed ? embed_shift : is_softmax ? shift : merged_shift - (exponent_on ? 5'(exponent) : 5'd0);
    sum_limit <= to_choice ? 23'd4194303 : to_cache ? 23'd127 : is_softmax ? 23'd8191 : 23'd32767;
  end
  wire level_valid, level_last;
  wire signed [22:0] level;
  requantise requantiser (
    .clk, .rst, .valid(sum_valid), .last(sum_last), .sum, .multiplier(sum_multiplier), .shift(sum_shift), .headroom,
    .limit(sum_limit), .out_valid(level_valid), .out_last(level_last), .out(level));

  // ---- vector memory ------------------------------------------------------------------------------------------
  wire residual_write, gate_write, residual_done, gate_done;
  wire [VECTOR_BITS-1:0] residual_read, residual_address, gate_address, norm_read, rotate_read_a, rotate_read_b, product_read;
  wire signed [15:0] residual_data, gate_data, vector_a, vector_b;
  wire [43:0] squares;
  vector_memory #(.DEPTH(VECTOR)) vectors (
    .clk, .write(residual_write || gate_write), .write_address(to_gate ? gate_address : residual_address),
    .write_data(to_gate ? gate_data : residual_data),
    .address_a(is_norm ? norm_read : is_rotate ? rotate_read_a : is_product ? product_read : residual_read),
    .address_b(rotate_read_b), .data_a(vector_a), .data_b(vector_b));
  residual #(.VECTOR_BITS(VECTOR_BITS)) to_vectors (
    .clk, .rst, .start(start && to_vector), .first(destination[VECTOR_BITS-1:0]),
    .add(adds), .valid(level_valid && to_vector), .last(level_last), .value(level[15:0]),
    .read_address(residual_read), .read_data(vector_a), .write(residual_write), .write_address(residual_address),
    .write_data(residual_data), .squares, .done(residual_done));
  gate #(.VECTOR_BITS(VECTOR_BITS)) gated (
    .clk, .rst, .start(start && to_gate), .first(destination[VECTOR_BITS-1:0]), .shift, .valid(level_valid && to_gate),
    .last(level_last), .value(level[15:0]), .write(gate_write), .write_address(gate_address), .write_data(gate_data), .exponent,
    .done(gate_done));

  // ---- vector units -------------------------------------------------------------------------------------------
  embed embedding (
    .clk, .rst, .start(start && is_embed), .rows, .row(gain), .parameter_address(embed_parameter), .parameter_data,
    .valid(embed_valid), .last(embed_last), .sum(embed_sum), .multiplier(embed_multiplier), .shift(embed_shift));

  wire norm_valid, norm_last;
  wire signed [7:0] norm_out;
  norm #(.VECTOR_BITS(VECTOR_BITS)) rms_norm (
    .clk, .rst, .start(start && is_norm), .rows, .source(source[VECTOR_BITS-1:0]), .gain, .shift, .epsilon(value), .squares,
    .vector_address(norm_read), .vector_data(vector_a), .parameter_address(norm_parameter),
    .parameter_data(parameter_data[15:0]), .valid(norm_valid), .last(norm_last), .out(norm_out));

  wire rotate_valid, rotate_head_last, rotate_last;
  wire signed [7:0] rotate_out;
  rotate #(.VECTOR_BITS(VECTOR_BITS)) rotation (
    .clk, .rst, .start(start && is_rotate), .rows, .head, .source(source[VECTOR_BITS-1:0]), .turn(gain),
    .ready(results_wanted), .address_a(rotate_read_a), .address_b(rotate_read_b), .data_a(vector_a), .data_b(vector_b),
    .parameter_address(rotate_parameter), .parameter_data, .valid(rotate_valid), .head_last(rotate_head_last),
    .last(rotate_last), .out(rotate_out));

  wire weight_valid, weight_last, softmax_done;
  wire [13:0] weight;
  wire [16:0] inverse;
  wire [4:0] total_exponent;
  softmax #(.CONTEXT(CONTEXT)) attention_weights (
    .clk, .rst, .clear(start && is_scores), .score_valid(merged_valid && is_scores), .score(merged_sum),
    .start(start && is_softmax), .rows((CONTEXT_BITS+1)'(position) + 1'b1), .distance_valid, .distance_last, .distance,
    .octaves_valid(level_valid && is_softmax), .octaves_last(level_last), .octaves(level[12:0]), .valid(weight_valid),
    .last(weight_last), .weight, .inverse, .exponent(total_exponent), .done(softmax_done));

  wire mean_valid, mean_last;
  wire signed [7:0] mean_out;
  mean weighted_mean (
    .clk, .rst, .start(start && is_values), .channels(rows[8:0]), .blocks, .gain, .shift, .inverse, .exponent(total_exponent),
    .valid(merged_valid && is_values), .part(merged_sum), .parameter_address(mean_parameter),
    .parameter_data(parameter_data[15:0]), .out_valid(mean_valid), .out_last(mean_last), .out(mean_out));

  wire product_valid, product_last;
  wire signed [7:0] product_out;
  product #(.VECTOR_BITS(VECTOR_BITS)) to_int8 (
    .clk, .rst, .start(start && is_product), .rows, .source(source[VECTOR_BITS-1:0]), .exponent, .vector_address(product_read),
    .vector_data(vector_a), .valid(product_valid), .last(product_last), .out(product_out));

  wire choice_done;
  choose choice (
    .clk, .rst, .start(start && to_choice), .key_lower(setting[16]), .key_upper(setting[17]), .temperature(setting[18][13:0]),
    .position(32'(position) + 32'd1), .valid(level_valid && to_choice), .last(level_last), .logit(level), .token(chosen),
    .done(choice_done));

  // ---- input memory: softmax weights apart from the rest, for a vector of means grows between them ---------------
  wire weights_write, weights_done, inputs_write, inputs_done;
  wire [INPUT_BITS-1:0] weights_address, inputs_address;
  wire [LANES*15-1:0] weights_data, inputs_data;
  wire signed [7:0] element = is_norm ? norm_out : is_rotate ? rotate_out : is_values ? mean_out : product_out;
  pack #(.LANES(LANES), .INPUT_BITS(INPUT_BITS)) pack_inputs (
    .clk, .rst, .start(start && to_inputs), .first(destination[INPUT_BITS-1:0]), .more(more),
    .valid(norm_valid || (rotate_valid && !to_cache) || mean_valid || product_valid),
    .break_after(is_rotate && rotate_head_last),
    .last(is_norm ? norm_last : is_rotate ? rotate_last : is_values ? mean_last : product_last), .element(15'(element)),
    .write(inputs_write), .write_address(inputs_address), .write_data(inputs_data), .done(inputs_done));
  pack #(.LANES(LANES), .INPUT_BITS(INPUT_BITS)) pack_weights (
    .clk, .rst, .start(start && is_softmax), .first(destination[INPUT_BITS-1:0]), .more(1'b0), .valid(weight_valid),
    .break_after(1'b0), .last(weight_last), .element({1'b0, weight}), .write(weights_write), .write_address(weights_address),
    .write_data(weights_data), .done(weights_done));
  assign input_write = inputs_write || weights_write;
  assign input_address = is_softmax ? weights_address : inputs_address;
  assign input_data = is_softmax ? weights_data : inputs_data;

  // ---- cache --------------------------------------------------------------------------------------------------
  wire store_valid = to_cache && (is_rotate ? rotate_valid : level_valid);
  reg [31:0] layer_base;
  always_ff @(posedge clk) layer_base <= cache_base + value;
  store #(.LANES(LANES), .ENGINES(ENGINES)) to_memory (
    .clk, .start(start && to_cache), .is_key(is_rotate), .base(layer_base), .engine_stride(cache_stride), .stride, .head,
    .row_beats, .unit, .slot(position), .valid(store_valid), .value(is_rotate ? rotate_out : level[7:0]), .push(store_push),
    .push_address(store_address), .push_lane(store_lane), .push_byte(store_byte));

  // ---- done -----------------------------------------------------------------------------------------------------
  wire stored, scored;
  delay #(.WIDTH(1), .CYCLES(5)) wait_store (
    .clk, .in(!rst && store_valid && (is_rotate ? rotate_last : level_last)), .out(stored));
  delay #(.WIDTH(1), .CYCLES(3)) wait_scores (.clk, .in(!rst && merged_valid && merged_last && is_scores), .out(scored));
  assign unit_done = load_done || residual_done || gate_done || choice_done || inputs_done || softmax_done || stored || scored;
  always_ff @(posedge clk) begin
    reads_pending <= |fetch_pending;
    stream_empty <= engine_starved[0] || (loading && !stream_valid[0]);
    queue_room <= queue_level < 5'd13;
    fenced_held <= fenced;
    if (rst || doorbell) done_held <= 1'b0;
    else if (done) done_held <= 1'b1;
    if (doorbell) begin
      cycles <= '0; beats <= '0; starved_cycles <= '0; fenced_cycles <= '0;
    end else begin
      cycles <= cycles + 32'(busy); beats <= beats + 32'(fetch_arrived[0]);
      starved_cycles <= starved_cycles + 32'(stream_empty); fenced_cycles <= fenced_cycles + 32'(fenced_held);
    end
  end
endmodule
