// Elements one after the other into words of input memory. The rest of a word that is cut short is zero.
module pack #(parameter int LANES = 64, parameter int INPUT_BITS = 7) (
  input  wire                  clk,
  input  wire                  rst,
  input  wire                  start,          // of a command; begins at `first` unless the last one left more to come
  input  wire [INPUT_BITS-1:0] first,
  input  wire                  more,           // the next command goes on with this vector
  input  wire                  valid,
  input  wire                  break_after,    // this element ends its word
  input  wire                  last,           // of this command
  input  wire signed [14:0]    element,
  output reg                   write,
  output reg  [INPUT_BITS-1:0] write_address,
  output reg  [LANES*15-1:0]   write_data,
  output reg                   done            // a pulse
);
  localparam int LANE_BITS = $clog2(LANES);
  reg [LANE_BITS-1:0] lane;
  reg going_on;
  wire full = lane == LANE_BITS'(LANES - 1) || break_after || (last && !more);
  always_ff @(posedge clk) begin
    write <= valid && full && !rst;
    done <= valid && last;
    if (valid)
      for (int i = 0; i < LANES; i++)
        if (lane == LANE_BITS'(i)) write_data[15*i +: 15] <= element;
        else if (lane == 0) write_data[15*i +: 15] <= '0;
    if (write) write_address <= write_address + 1'b1;
    if (rst) begin
      lane <= '0; going_on <= 1'b0;
    end else if (start) begin
      if (!going_on) begin
        lane <= '0; write_address <= first;
      end
    end else if (valid) begin
      lane <= full ? '0 : lane + 1'b1;
      if (last) going_on <= more;
    end
  end
endmodule
