// int16 elements with one write and two read ports: the same memory twice.
module vector_memory #(parameter int DEPTH = 4096, localparam int BITS = $clog2(DEPTH)) (
  input  wire                clk,
  input  wire                write,
  input  wire [BITS-1:0]     write_address,
  input  wire signed [15:0]  write_data,
  input  wire [BITS-1:0]     address_a,
  input  wire [BITS-1:0]     address_b,
  output wire signed [15:0]  data_a,       // two cycles after the address
  output wire signed [15:0]  data_b
);
  ram #(.WIDTH(16), .DEPTH(DEPTH)) a (.clk, .write, .write_address, .write_data, .address(address_a), .data(data_a));
  ram #(.WIDTH(16), .DEPTH(DEPTH)) b (.clk, .write, .write_address, .write_data, .address(address_b), .data(data_b));
endmodule
