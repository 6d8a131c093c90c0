// AXI4-Lite slave: the registers of fpga_backend/registers.py.
module control #(
  parameter int LANES = 64,
  parameter int ENGINES = 1,
  parameter int VECTOR = 4096,
  parameter int INPUTS = 128,
  parameter int PARAMETERS = 256,
  parameter int CONTEXT = 2048,
  parameter int COMMANDS = 1024,
  parameter int COUNTERS = 14
) (
  input  wire                   clk,
  input  wire                   rst,
  input  wire                   awvalid,
  output wire                   awready,
  input  wire [7:0]             awaddr,
  input  wire                   wvalid,
  output wire                   wready,
  input  wire [31:0]            wdata,
  input  wire [3:0]             wstrb,
  output reg                    bvalid,
  input  wire                   bready,
  input  wire                   arvalid,
  output wire                   arready,
  input  wire [7:0]             araddr,
  output reg                    rvalid,
  input  wire                   rready,
  output reg  [31:0]            rdata,
  // To the core
  output reg                    doorbell,
  output wire [19*32-1:0]       settings,       // COMMANDS_LOW to TEMPERATURE
  // From the core
  input  wire [31:0]            status,
  input  wire [31:0]            error,
  input  wire [31:0]            new_length,
  input  wire [31:0]            computed,
  input  wire [31:0]            position,
  input  wire [31:0]            command,
  input  wire [COUNTERS*32-1:0] counters        // CYCLES to CYCLES_PRODUCT
);
  localparam int SETTINGS = 19;
  reg [1:0] reading;
  wire write = awvalid && wvalid && !bvalid;
  assign awready = write;
  assign wready = write;
  assign arready = arvalid && !rvalid && reading == 0;
  wire [5:0] place = awaddr[7:2];

  reg [31:0] held [0:SETTINGS-1];
  genvar s;
  generate
    for (s = 0; s < SETTINGS; s++) begin : setting
      assign settings[32*s +: 32] = held[s];
      always_ff @(posedge clk)
        if (rst) held[s] <= '0;
        else if (write && place == draft_pkg::REG_COMMANDS_LOW + 6'(s))
          for (int b = 0; b < 4; b++) if (wstrb[b]) held[s][8*b +: 8] <= wdata[8*b +: 8];
    end
  endgenerate

  // A read takes three cycles: the place, what is there among settings, counters and the rest, and one of these.
  reg [5:0] asked;
  reg [31:0] of_settings, of_counters, of_core;
  wire [5:0] read_place = araddr[7:2];
  reg [5:0] setting_place, counter_place;
  always_ff @(posedge clk) begin
    of_settings <= setting_place < 6'(SETTINGS) ? settings[32*setting_place +: 32] : '0;
    of_counters <= counter_place < 6'(COUNTERS) ? counters[32*counter_place +: 32] : '0;
    case (asked)
      draft_pkg::REG_STATUS: of_core <= status;
      draft_pkg::REG_ERROR: of_core <= error;
      draft_pkg::REG_ID: of_core <= draft_pkg::ID;
      draft_pkg::REG_SHAPE: of_core <= {16'(ENGINES), 16'(LANES)};
      draft_pkg::REG_VECTOR_SIZE: of_core <= 32'(VECTOR);
      draft_pkg::REG_INPUT_SIZE: of_core <= 32'(INPUTS);
      draft_pkg::REG_PARAMETER_SIZE: of_core <= 32'(PARAMETERS);
      draft_pkg::REG_CONTEXT_SIZE: of_core <= 32'(CONTEXT);
      draft_pkg::REG_COMMAND_SIZE: of_core <= 32'(COMMANDS);
      draft_pkg::REG_NEW_LENGTH: of_core <= new_length;
      draft_pkg::REG_COMPUTED: of_core <= computed;
      draft_pkg::REG_POSITION: of_core <= position;
      draft_pkg::REG_COMMAND: of_core <= command;
      default: of_core <= '0;
    endcase
    if (arready) begin
      asked <= read_place;
      setting_place <= read_place - draft_pkg::REG_COMMANDS_LOW; counter_place <= read_place - draft_pkg::REG_CYCLES;
    end
    doorbell <= write && place == draft_pkg::REG_CONTROL && wdata[0] && wstrb[0];
    if (rst) begin
      bvalid <= 1'b0; rvalid <= 1'b0; reading <= '0; doorbell <= 1'b0;
    end else begin
      bvalid <= write || (bvalid && !bready);
      reading <= {reading[0], arready};
      rvalid <= reading[1] || (rvalid && !rready);
      if (reading[1]) rdata <= asked >= draft_pkg::REG_CYCLES ? of_counters
        : asked >= draft_pkg::REG_NEW_LENGTH ? of_core : asked >= draft_pkg::REG_COMMANDS_LOW ? of_settings : of_core;
    end
  end
endmodule
