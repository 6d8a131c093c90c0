// A memory with one write and one read port. Data comes two cycles after its address: one register is the
// memory's own, the second keeps its slow output away from logic.
module ram #(parameter int WIDTH = 8, parameter int DEPTH = 16, localparam int BITS = $clog2(DEPTH)) (
  input  wire             clk,
  input  wire             write,
  input  wire [BITS-1:0]  write_address,
  input  wire [WIDTH-1:0] write_data,
  input  wire [BITS-1:0]  address,
  output reg  [WIDTH-1:0] data
);
  reg [WIDTH-1:0] memory [0:DEPTH-1];
  reg [WIDTH-1:0] read;
  always_ff @(posedge clk) begin
    if (write) memory[write_address] <= write_data;
    read <= memory[address];
    data <= read;
  end
endmodule
