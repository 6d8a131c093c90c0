// A row of the embedding: its requantiser in the first four bytes, then int8 elements for the shared requantiser.
module embed (
  input  wire               clk,
  input  wire               rst,
  input  wire               start,
  input  wire [19:0]        rows,
  input  wire [15:0]        row,         // byte of parameter memory
  output reg  [15:0]        parameter_address,
  input  wire [31:0]        parameter_data,
  output wire               valid,
  output wire               last,
  output wire signed [31:0] sum,
  output reg  [14:0]        multiplier,
  output reg  [4:0]         shift
);
  // The first address is that of the requantiser, those behind it of elements.
  reg running, first;
  reg [19:0] left;
  reg [2:0] run, heads, ends;
  always_ff @(posedge clk) begin
    run <= rst ? '0 : {run[1:0], running};
    heads <= {heads[1:0], first};
    ends <= {ends[1:0], left == 20'd1};
    if (heads[2] && run[2]) {shift, multiplier} <= {parameter_data[20:16], parameter_data[14:0]};
    if (rst) running <= 1'b0;
    else if (start) begin
      running <= 1'b1; first <= 1'b1; left <= rows; parameter_address <= row;
    end else if (running) begin
      first <= 1'b0;
      parameter_address <= parameter_address + (first ? 16'd4 : 16'd1);
      if (!first) begin
        left <= left - 20'd1;
        if (left == 20'd1) running <= 1'b0;
      end
    end
  end
  // A cycle later than the data: the requantiser is there then.
  reg valid_held, last_held;
  reg signed [7:0] element;
  always_ff @(posedge clk) begin
    valid_held <= run[2] && !heads[2] && !rst;
    last_held <= ends[2];
    element <= parameter_data[7:0];
  end
  assign valid = valid_held;
  assign last = last_held;
  assign sum = 32'(element);
endmodule
