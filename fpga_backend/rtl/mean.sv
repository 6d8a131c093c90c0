// Weighted sums of values arrive for a block of LANES slots after the other, all channels of a block in turn. They are
// added up; those of the last block become the mean, int8.
module mean (
  input  wire               clk,
  input  wire               rst,
  input  wire               start,
  input  wire [8:0]         channels,
  input  wire [11:0]        blocks,
  input  wire [15:0]        gain,          // byte of parameter memory
  input  wire [4:0]         shift,
  input  wire [16:0]        inverse,
  input  wire [4:0]         exponent,
  input  wire               valid,
  input  wire signed [31:0] part,
  output reg  [15:0]        parameter_address,
  input  wire signed [15:0] parameter_data,
  output wire               out_valid,
  output wire               out_last,
  output wire signed [7:0]  out
);
  reg [7:0] channel;
  reg [11:0] blocks_left;
  reg first_block;
  reg [7:0] last_channel;
  always_ff @(posedge clk) last_channel <= 8'(channels - 9'd1);
  wire channel_last = channel == last_channel;
  wire last_block = blocks_left == 12'd1;
  always_ff @(posedge clk)
    if (start) begin
      channel <= '0; blocks_left <= blocks; first_block <= 1'b1;
    end else if (valid) begin
      channel <= channel_last ? '0 : channel + 8'd1;
      if (channel_last) begin
        blocks_left <= blocks_left - 12'd1; first_block <= 1'b0;
      end
    end

  // 1, 2: read what there is; 3: add; written back in the cycle after.
  wire signed [31:0] part_late, held;
  wire first_late;
  wire [7:0] channel_late;
  delay #(.WIDTH(33), .CYCLES(2)) wait_read (.clk, .in({first_block, part}), .out({first_late, part_late}));
  delay #(.WIDTH(8), .CYCLES(3)) wait_sum (.clk, .in(channel), .out(channel_late));
  reg signed [31:0] sum, rounded, coarse, fine, half;
  reg signed [15:0] scaled;
  reg [7:1] valids, ends;
  reg [3:1] writes;
  wire [4:0] places = exponent - 5'd7;     // 6 to 17
  ram #(.WIDTH(32), .DEPTH(256)) sums (
    .clk, .write(writes[3]), .write_address(channel_late), .write_data(sum), .address(channel), .data(held));
  always_ff @(posedge clk) begin
    valids <= rst ? '0 : {valids[6:1], valid && last_block};
    ends <= {ends[6:1], channel_last};
    writes <= rst ? '0 : {writes[2:1], valid};
    half <= 32'sd1 <<< (places - 5'd1);
    sum <= (first_late ? 32'sd0 : held) + part_late;
    rounded <= sum + half;
    coarse <= rounded >>> {places[4:3], 3'd0};
    fine <= coarse >>> places[2:0];
    scaled <= fine > 32'sd32767 ? 16'sd32767 : fine < -32'sd32767 ? -16'sd32767 : fine[15:0];
  end

  // The mean, Q8.7, then gains, which are asked for 3 cycles before it is there.
  wire mean_valid, mean_last;
  wire signed [16:0] average;
  scale #(.A(16), .B(17), .OUT(17)) by_total (
    .clk, .rst, .valid(valids[7]), .last(ends[7]), .a(scaled), .b(inverse), .shift(5'd15), .limit(16'hFFFF),
    .out_valid(mean_valid), .out_last(mean_last), .out(average));
  wire ask;
  delay #(.WIDTH(1), .CYCLES(4)) wait_ask (.clk, .in(valids[7]), .out(ask));
  always_ff @(posedge clk)
    if (start) parameter_address <= gain;
    else if (ask) parameter_address <= parameter_address + 16'd2;
  scale #(.A(17), .B(16), .OUT(8)) by_gain (
    .clk, .rst, .valid(mean_valid), .last(mean_last), .a(average), .b(parameter_data), .shift, .limit(7'd127),
    .out_valid, .out_last, .out);
endmodule
