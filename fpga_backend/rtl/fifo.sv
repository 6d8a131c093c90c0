// A FIFO over a synchronous memory; the first entry shows by itself. Who pushes must know that there is room.
module fifo #(parameter int WIDTH = 8, parameter int DEPTH = 16, localparam int BITS = $clog2(DEPTH)) (
  input  wire             clk,
  input  wire             rst,
  input  wire             push,
  input  wire [WIDTH-1:0] push_data,
  output reg              valid,
  input  wire             pop,     // only while valid
  output reg  [WIDTH-1:0] data,
  output reg  [BITS:0]    level    // entries, those on their way to the output included
);
  reg [WIDTH-1:0] memory [0:DEPTH-1];
  reg [WIDTH-1:0] read;
  reg [BITS:0] head, tail;
  reg read_valid;
  wire some = head != tail;
  wire move_out  = !valid || pop;          // read -> data
  wire move_read = !read_valid || move_out; // memory -> read
  always_ff @(posedge clk) begin
    if (push) memory[head[BITS-1:0]] <= push_data;
    if (move_read) read <= memory[tail[BITS-1:0]];
    if (move_out) data <= read;
    if (rst) begin
      head <= '0; tail <= '0; level <= '0; valid <= 1'b0; read_valid <= 1'b0;
    end else begin
      if (push) head <= head + 1'b1;
      if (move_read && some) tail <= tail + 1'b1;
      if (move_read) read_valid <= some;
      if (move_out) valid <= read_valid;
      if (push && !pop) level <= level + 1'b1;
      if (pop && !push) level <= level - 1'b1;
    end
  end
endmodule
