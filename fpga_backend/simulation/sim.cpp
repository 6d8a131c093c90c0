// The verilated core with a memory behind its AXI ports, as a C library. Every handshake is checked against AXI4.
//
// The memory is as unhelpful as AXI allows: a read gives what memory held when its address was accepted, a write
// counts from its answer on. So a core that reads its cache before its own writes are answered gets old data.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "Vdraft_core.h"
#include "verilated.h"

namespace {

constexpr uint32_t kPage = 4096;
constexpr size_t kOutstanding = 64;
constexpr int kHandshakeCycles = 1000;

template <typename Port>
uint64_t field(const Port& port, unsigned low, unsigned bits) {  // bits of a port of any width
  const auto* bytes = reinterpret_cast<const uint8_t*>(&port);
  uint64_t value = 0;
  std::memcpy(&value, bytes + low / 8, std::min<size_t>(8, sizeof(port) - low / 8));
  value >>= low % 8;
  return bits == 64 ? value : value & ((uint64_t(1) << bits) - 1);
}

template <typename Port>
void set_bit(Port& port, unsigned bit, bool value) {
  port = (port & ~(Port(1) << bit)) | (Port(value) << bit);
}

struct Burst {
  uint64_t ready;  // cycle
  bool bad;        // outside memory
  std::vector<uint8_t> data;
  size_t at = 0;
};

struct Held {  // a channel whose VALID is up without READY: nothing may change
  bool waiting = false;
  std::string payload;
};

struct Sim {
  VerilatedContext context;
  Vdraft_core* top;
  uint8_t* memory;
  uint64_t bytes, cycle = 0;
  uint32_t latency = 100, rate_beats = 1, rate_cycles = 1, stall = 0;  // stall: of 1024
  uint64_t random;
  std::deque<Burst> reads[ENGINES];
  bool read_shown[ENGINES] = {};
  uint32_t credit[ENGINES] = {};
  std::deque<uint64_t> addresses;                                  // accepted write addresses
  std::deque<std::pair<std::vector<uint8_t>, uint64_t>> beats;     // accepted write data and strobes
  struct Write {
    uint64_t ready, address, strobe;
    std::vector<uint8_t> data;
    bool bad;
  };
  std::deque<Write> answers;
  bool answer_shown = false;
  Held held[ENGINES + 4];
  std::string problem;

  Sim(uint64_t size, uint64_t seed) : bytes(size), random(seed * 2 + 1) {
    context.randReset(2);
    context.randSeed(int(seed % 1000000) + 1);
    top = new Vdraft_core{&context};
    memory = static_cast<uint8_t*>(std::calloc(size, 1));
    top->clk = 0;
    top->rst = 1;
    top->s_awvalid = top->s_wvalid = top->s_arvalid = top->s_bready = top->s_rready = 0;
    for (int i = 0; i < 64; i++) tick();
    top->rst = 0;
    tick();
  }
  ~Sim() {
    delete top;
    std::free(memory);
  }

  bool chance() {  // true: stall
    random ^= random << 13, random ^= random >> 7, random ^= random << 17;
    return (random >> 20) % 1024 < stall;
  }
  void fail(const std::string& what) {
    if (problem.empty()) problem = what + " in cycle " + std::to_string(cycle);
  }
  template <typename... Ports>
  void steady(int channel, const char* name, bool valid, bool ready, const Ports&... ports) {
    std::string payload;
    (payload.append(reinterpret_cast<const char*>(&ports), sizeof(ports)), ...);
    Held& was = held[channel];
    if (was.waiting && !top->rst) {
      if (!valid) fail(std::string(name) + " fell before it was answered");
      else if (payload != was.payload) fail(std::string(name) + ": the payload changed before it was answered");
    }
    was.waiting = valid && !ready;
    was.payload = std::move(payload);
  }

  void drive() {
    for (int e = 0; e < ENGINES; e++) {
      set_bit(top->m_arready, e, reads[e].size() < kOutstanding && !chance());
      if (!read_shown[e]) {
        credit[e] = std::min(credit[e] + rate_beats, rate_beats + rate_cycles);
        if (!reads[e].empty() && reads[e].front().ready <= cycle && credit[e] >= rate_cycles && !chance()) {
          credit[e] -= rate_cycles;
          read_shown[e] = true;
        }
      }
      set_bit(top->m_rvalid, e, read_shown[e]);
      if (read_shown[e]) {
        const Burst& burst = reads[e].front();
        std::memcpy(reinterpret_cast<uint8_t*>(&top->m_rdata) + e * LANES, burst.data.data() + burst.at, LANES);
        set_bit(top->m_rlast, e, burst.at + LANES == burst.data.size());
        set_bit(top->m_rresp, 2 * e, burst.bad);
        set_bit(top->m_rresp, 2 * e + 1, burst.bad);
      }
    }
    top->m_awready = addresses.size() < kOutstanding && !chance();
    top->m_wready = beats.size() < kOutstanding && !chance();
    if (!answer_shown && !answers.empty() && answers.front().ready <= cycle && !chance()) {
      answer_shown = true;
      const Write& write = answers.front();
      for (int i = 0; i < LANES && !write.bad; i++)
        if (write.strobe >> i & 1) memory[write.address + i] = write.data[i];
    }
    top->m_bvalid = answer_shown;
    top->m_bresp = answer_shown && answers.front().bad ? 3 : 0;
  }

  void check() {
    for (int e = 0; e < ENGINES; e++) {
      uint64_t address = field(top->m_araddr, 64 * e, 64), length = field(top->m_arlen, 8 * e, 8);
      steady(e, "ARVALID", field(top->m_arvalid, e, 1), field(top->m_arready, e, 1), address, length);
      if (field(top->m_arvalid, e, 1) && !top->rst) {
        if (address % LANES) fail("a read is not aligned");
        if (address % kPage + (length + 1) * LANES > kPage) fail("a read burst crosses 4096 bytes");
        if ((1u << top->m_arsize) != LANES || top->m_arburst != 1) fail("a read burst has a wrong size or kind");
      }
      if (field(top->m_rvalid, e, 1) && !field(top->m_rready, e, 1)) fail("a read beat was asked for and not accepted");
    }
    steady(ENGINES, "AWVALID", top->m_awvalid, top->m_awready, top->m_awaddr, top->m_awlen);
    steady(ENGINES + 1, "WVALID", top->m_wvalid, top->m_wready, top->m_wdata, top->m_wstrb, top->m_wlast);
    steady(ENGINES + 2, "BVALID of the slave", top->s_bvalid, top->s_bready, top->s_bresp);
    steady(ENGINES + 3, "RVALID of the slave", top->s_rvalid, top->s_rready, top->s_rdata);
    if (top->rst) return;
    if (top->m_awvalid && (top->m_awlen || top->m_awaddr % LANES || (1u << top->m_awsize) != LANES || top->m_awburst != 1))
      fail("a write burst has a wrong shape");
    if (top->m_wvalid && !top->m_wlast) fail("the only beat of a write is not its last");
    if (top->m_wvalid && !field(top->m_wstrb, 0, LANES < 64 ? LANES : 64)) fail("a write has no strobes");
    if (top->m_bvalid && !top->m_bready) fail("an answer to a write was not accepted");
  }

  void tick() {
    drive();
    top->eval();
    check();
    bool reset = top->rst;
    struct Accepted { bool address, data; uint64_t at, beats; } port[ENGINES];
    for (int e = 0; e < ENGINES; e++)
      port[e] = {bool(field(top->m_arvalid, e, 1) && field(top->m_arready, e, 1)),
                 bool(field(top->m_rvalid, e, 1) && field(top->m_rready, e, 1)), field(top->m_araddr, 64 * e, 64),
                 field(top->m_arlen, 8 * e, 8) + 1};
    bool address = top->m_awvalid && top->m_awready, data = top->m_wvalid && top->m_wready;
    bool answer = top->m_bvalid && top->m_bready;
    uint64_t at = top->m_awaddr;
    std::vector<uint8_t> beat;
    uint64_t strobe = 0;
    if (data) {
      beat.resize(LANES);
      std::memcpy(beat.data(), &top->m_wdata, LANES);
      strobe = field(top->m_wstrb, 0, LANES < 64 ? LANES : 64);
    }
    top->clk = 1;
    top->eval();
    top->clk = 0;
    cycle++;
    if (reset) return;
    for (int e = 0; e < ENGINES; e++) {
      if (port[e].data) {
        read_shown[e] = false;
        Burst& burst = reads[e].front();
        burst.at += LANES;
        if (burst.at == burst.data.size()) reads[e].pop_front();
      }
      if (port[e].address) {
        uint64_t size = port[e].beats * LANES;
        Burst burst{cycle + latency, port[e].at + size > bytes, std::vector<uint8_t>(size)};
        if (!burst.bad) std::memcpy(burst.data.data(), memory + port[e].at, size);
        reads[e].push_back(std::move(burst));
      }
    }
    if (address) addresses.push_back(at);
    if (data) beats.push_back({std::move(beat), strobe});
    if (answer) {
      answer_shown = false;
      answers.pop_front();
    }
    if (!addresses.empty() && !beats.empty()) {
      answers.push_back({cycle + latency, addresses.front(), beats.front().second, std::move(beats.front().first),
                         addresses.front() + LANES > bytes});
      addresses.pop_front();
      beats.pop_front();
    }
  }
};

}  // namespace

extern "C" {

Sim* sim_new(uint64_t bytes, uint64_t seed) { return new Sim(bytes, seed); }
void sim_free(Sim* sim) { delete sim; }
uint8_t* sim_memory(Sim* sim) { return sim->memory; }
const char* sim_problem(Sim* sim) { return sim->problem.c_str(); }

// A beat takes rate_cycles / rate_beats cycles at least; a handshake is held back in `stall` of 1024 cycles.
void sim_set(Sim* sim, uint32_t latency, uint32_t rate_beats, uint32_t rate_cycles, uint32_t stall) {
  sim->latency = latency, sim->rate_beats = rate_beats, sim->rate_cycles = rate_cycles, sim->stall = stall;
}

// 0, or 1 if the slave does not answer.
int sim_write(Sim* sim, uint32_t offset, uint32_t value) {
  auto* top = sim->top;
  bool address = true, data = true;
  top->s_awaddr = offset, top->s_wdata = value, top->s_wstrb = 15;
  for (int i = 0; i < kHandshakeCycles; i++) {
    top->s_awvalid = address && (top->s_awvalid || !sim->chance());
    top->s_wvalid = data && (top->s_wvalid || !sim->chance());
    top->s_bready = !sim->chance();
    sim->drive();
    top->eval();
    bool address_done = top->s_awvalid && top->s_awready, data_done = top->s_wvalid && top->s_wready;
    bool answered = top->s_bvalid && top->s_bready;
    sim->tick();
    address &= !address_done, data &= !data_done;
    if (!address) top->s_awvalid = 0;
    if (!data) top->s_wvalid = 0;
    if (answered) return top->s_bready = 0;
  }
  return 1;
}

int sim_read(Sim* sim, uint32_t offset, uint32_t* value) {
  auto* top = sim->top;
  bool address = true;
  top->s_araddr = offset;
  for (int i = 0; i < kHandshakeCycles; i++) {
    top->s_arvalid = address && (top->s_arvalid || !sim->chance());
    top->s_rready = !sim->chance();
    sim->drive();
    top->eval();
    bool address_done = top->s_arvalid && top->s_arready, answered = top->s_rvalid && top->s_rready;
    *value = top->s_rdata;
    sim->tick();
    address &= !address_done;
    if (!address) top->s_arvalid = 0;
    if (answered) return top->s_rready = 0;
  }
  return 1;
}

// Until the core is done, at most so many cycles. 1: it is done.
int sim_run(Sim* sim, uint64_t most) {
  for (uint64_t i = 0; i < most && sim->problem.empty(); i++) {
    sim->tick();
    if (sim->top->irq) return 1;
  }
  return 0;
}
}
