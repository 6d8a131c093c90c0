// Threefry-2x32 with 20 rounds, the first word of two, every cycle another counter; 26 cycles.
module threefry (
  input  wire        clk,
  input  wire [31:0] key_upper,    // key and x0 are stable long before the first x1
  input  wire [31:0] key_lower,
  input  wire [31:0] x0,
  input  wire [31:0] x1,
  output wire [31:0] out
);
  function automatic int rotation(input int round);
    case (round % 8)
      0: rotation = 13;
      1: rotation = 15;
      2: rotation = 26;
      3: rotation = 6;
      4: rotation = 17;
      5: rotation = 29;
      6: rotation = 16;
      default: rotation = 24;
    endcase
  endfunction

  // What is added after block b of four rounds (0: before the first).
  reg [31:0] third;
  always_ff @(posedge clk) third <= key_upper ^ key_lower ^ 32'h1BD11BDA;
  wire [31:0] key [0:2];
  assign key[0] = key_upper;
  assign key[1] = key_lower;
  assign key[2] = third;

  wire [31:0] a [0:26], b [0:26];
  assign a[0] = x0;
  assign b[0] = x1;
  genvar block, round;
  generate
    for (block = 0; block <= 5; block++) begin : blocks
      reg [31:0] a_out, b_out, b_key;
      always_ff @(posedge clk) begin
        b_key <= key[(block + 1) % 3] + 32'(block);
        a_out <= a[5*block] + key[block % 3];
        b_out <= b[5*block] + b_key;
      end
      assign a[5*block+1] = a_out;
      assign b[5*block+1] = b_out;
      if (block < 5) begin : four
        for (round = 0; round < 4; round++) begin : rounds
          localparam int R = rotation(4 * block + round);
          wire [31:0] a_in = a[5*block+1+round], b_in = b[5*block+1+round];
          wire [31:0] a_sum = a_in + b_in;
          reg [31:0] a_next, b_next;
          always_ff @(posedge clk) begin
            a_next <= a_sum;
            b_next <= {b_in[31-R:0], b_in[31:32-R]} ^ a_sum;
          end
          assign a[5*block+2+round] = a_next;
          assign b[5*block+2+round] = b_next;
        end
      end
    end
  endgenerate
  assign out = a[26];
endmodule
