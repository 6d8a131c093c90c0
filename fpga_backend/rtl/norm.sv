// RMSNorm: int16 from vector memory to int8 for input memory, from the sum of squares that the last writer left.
module norm #(parameter int VECTOR_BITS = 12) (
  input  wire                   clk,
  input  wire                   rst,
  input  wire                   start,
  input  wire [19:0]            rows,
  input  wire [VECTOR_BITS-1:0] source,
  input  wire [15:0]            gain,          // byte of parameter memory
  input  wire [4:0]             shift,
  input  wire [31:0]            epsilon,
  input  wire [43:0]            squares,
  output reg  [VECTOR_BITS-1:0] vector_address,
  input  wire signed [15:0]     vector_data,
  output reg  [15:0]            parameter_address,
  input  wire signed [15:0]     parameter_data,
  output wire                   valid,
  output wire                   last,
  output wire signed [7:0]      out
);
  localparam logic [2:0] IDLE = 3'd0, ADD = 3'd1, CARRY = 3'd2, NORMALISE = 3'd3, ROOT = 3'd4, RUN = 3'd5;
  reg [2:0] state;
  reg [43:0] total;                    // normalised: one of the two upper bits is set
  reg [4:0] exponent;
  reg carry;
  reg [2:0] waited;
  reg [19:0] left;
  wire running = state == RUN;
  always_ff @(posedge clk) begin
    if (rst) state <= IDLE;
    else case (state)
      IDLE: if (start) state <= ADD;
      ADD: begin
        {carry, total[31:0]} <= {1'b0, squares[31:0]} + {1'b0, epsilon};
        total[43:32] <= squares[43:32];
        exponent <= 5'd21;
        state <= CARRY;
      end
      CARRY: begin
        total[43:32] <= total[43:32] + 12'(carry);
        state <= NORMALISE;
      end
      NORMALISE:
        if (total[43:42] == 2'd0) begin
          total <= {total[41:0], 2'd0};
          exponent <= exponent - 5'd1;
        end else state <= ROOT;
      ROOT: if (waited == 3'd6) state <= RUN;
      RUN: if (left == 20'd1) state <= IDLE;
      default: state <= IDLE;
    endcase
    waited <= state == ROOT ? waited + 3'd1 : '0;
    if (start) begin
      left <= rows; vector_address <= source;
    end else if (running) begin
      left <= left - 20'd1; vector_address <= vector_address + 1'b1;
    end
  end

  // 1 / sqrt of the mantissa, UQ1.15.
  wire signed [18:0] base, root;
  wire signed [12:0] delta;
  wire [7:0] segment = total[43:36] - 8'd64;
  rom_rsqrt table_rsqrt (.clk, .address(segment), .base, .delta);
  interpolate #(.BITS(8)) interpolation (.clk, .fraction(total[35:28]), .base, .delta, .out(root));

  // Data of vector memory comes after 2 cycles, `unit` 7 later; gains are asked for 3 cycles before that.
  reg [6:1] run, ends;
  always_ff @(posedge clk) begin
    run <= rst ? '0 : {run[5:1], running};
    ends <= {ends[5:1], left == 20'd1};
    if (start) parameter_address <= gain;
    else if (run[6]) parameter_address <= parameter_address + 16'd2;
  end
  wire unit_valid, unit_last;
  wire signed [15:0] unit;
  scale #(.A(16), .B(17), .OUT(16)) to_unit (
    .clk, .rst, .valid(run[2]), .last(ends[2]), .a(vector_data), .b(root[16:0]), .shift(exponent), .limit(15'd32767),
    .out_valid(unit_valid), .out_last(unit_last), .out(unit));
  scale #(.A(16), .B(16), .OUT(8)) to_int8 (
    .clk, .rst, .valid(unit_valid), .last(unit_last), .a(unit), .b(parameter_data), .shift, .limit(7'd127),
    .out_valid(valid), .out_last(last), .out);
endmodule
