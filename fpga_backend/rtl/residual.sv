// Results into vector memory, added to what is there if wanted, and the sum of their squares for the next norm.
module residual #(parameter int VECTOR_BITS = 12) (
  input  wire                   clk,
  input  wire                   rst,
  input  wire                   start,
  input  wire [VECTOR_BITS-1:0] first,
  input  wire                   add,
  input  wire                   valid,
  input  wire                   last,
  input  wire signed [15:0]     value,
  output reg  [VECTOR_BITS-1:0] read_address,
  input  wire signed [15:0]     read_data,
  output reg                    write,
  output reg  [VECTOR_BITS-1:0] write_address,
  output reg  signed [15:0]     write_data,
  output wire [43:0]            squares,
  output wire                   done            // a pulse; `squares` is complete
);
  localparam int LATENCY = 9;
  reg [LATENCY-1:0] valids, lasts;
  wire signed [15:0] value_late;
  delay #(.WIDTH(16), .CYCLES(2)) wait_read (.clk, .in(value), .out(value_late));
  reg signed [16:0] sum;
  reg signed [31:0] square, square_late;
  reg [24:0] low;            // lower 24 bits of the sum and its carry
  reg [6:0] high;
  reg [19:0] upper;
  assign done = valids[LATENCY-1] && lasts[LATENCY-1];
  always_ff @(posedge clk) begin
    valids <= rst || start ? '0 : {valids[LATENCY-2:0], valid};
    lasts <= {lasts[LATENCY-2:0], last};
    if (start) read_address <= first;
    else if (valid) read_address <= read_address + 1'b1;
    sum <= (add ? 17'(read_data) : 17'sd0) + 17'(value_late);
    write_data <= sum > 17'sd32767 ? 16'sd32767 : sum < -17'sd32767 ? -16'sd32767 : sum[15:0];
    write <= valids[2];
    if (start) write_address <= first;
    else if (write) write_address <= write_address + 1'b1;
    square <= write_data * write_data;
    square_late <= square;
    // Two halves of the sum, the upper one a cycle later.
    low <= {1'b0, low[23:0]} + (valids[5] ? {1'b0, square_late[23:0]} : 25'd0);
    high <= valids[5] ? square_late[30:24] : 7'd0;
    upper <= upper + 20'(high) + 20'(low[24]);
    if (start) begin
      low <= '0; high <= '0; upper <= '0;
    end
  end
  assign squares = {upper, low[23:0]};
endmodule
