#include <link.h>
#include <setjmp.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "cuda_runtime.h"

namespace emulator {

Thread* current = nullptr;

namespace {

constexpr size_t kStackBytes = 64 << 10;

struct Barrier {
  unsigned generation = 0;
  unsigned arrived = 0;
};

struct Warp : Barrier {
  uint64_t words[2][32];
};

struct Fiber : Thread {
  ucontext_t start;
  jmp_buf resume;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  Barrier* waits_for = nullptr;
  unsigned waits_while = 0;
  bool started = false;
  bool done = false;

  bool blocked() const { return waits_for != nullptr && waits_for->generation == waits_while; }
};

struct Block {
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Warp> warps;
  Barrier barrier;
  Barrier cluster;  // all of the block's threads may wait here for the other blocks
  unsigned live;
  std::vector<char> shared;  // while another block runs

  bool waits_for_cluster() const { return live > 0 && cluster.arrived == live; }
};

jmp_buf scheduler;
std::vector<Block> blocks;
Block* running;
const std::function<void()>* body;
std::mt19937 order(0);

Fiber& self() { return static_cast<Fiber&>(*current); }

void enter() {
  (*body)();
  self().done = true;
  Barrier& barrier = running->barrier;
  if (--running->live > 0 && barrier.arrived == running->live) {
    barrier.arrived = 0;  // a barrier does not wait for a thread that left
    ++barrier.generation;
  }
  _longjmp(scheduler, 1);
}

void arrive(Barrier& at, unsigned expected) {
  const unsigned generation = at.generation;
  if (++at.arrived == expected) {
    at.arrived = 0;
    ++at.generation;
  }
  Fiber& fiber = self();
  fiber.waits_for = &at;
  fiber.waits_while = generation;
  if (_setjmp(fiber.resume) == 0) _longjmp(scheduler, 1);
}

// Not inlined: what longjmp may clobber must not be the caller's loop.
__attribute__((noinline)) void resume(Fiber& fiber) {
  current = &fiber;
  if (_setjmp(scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.resume, 1);
  fiber.started = true;
  setcontext(&fiber.start);
}

// The library's thread-local data.
struct SharedMemory {
  char* data = nullptr;
  size_t size = 0;

  SharedMemory() { dl_iterate_phdr(find, this); }
  static int find(dl_phdr_info* object, size_t, void* result) {
    const uintptr_t here = reinterpret_cast<uintptr_t>(&find);
    bool ours = false;
    size_t size = 0;
    for (int i = 0; i < object->dlpi_phnum; ++i) {
      const ElfW(Phdr)& part = object->dlpi_phdr[i];
      const uintptr_t start = object->dlpi_addr + part.p_vaddr;
      ours |= part.p_type == PT_LOAD && here >= start && here < start + part.p_memsz;
      if (part.p_type == PT_TLS) size = part.p_memsz;
    }
    if (ours) {
      auto& memory = *static_cast<SharedMemory*>(result);
      memory.data = static_cast<char*>(object->dlpi_tls_data);
      memory.size = size;
    }
    return ours;
  }
};

SharedMemory& shared_memory() {
  static thread_local char touched;  // the data exists once it is used
  touched = 0;
  asm volatile("" : : "r"(&touched) : "memory");
  static SharedMemory memory;
  return memory;
}

void start(Block& block, dim3 index, dim3 size, dim3 grid) {
  while (block.fibers.size() < size.x) block.fibers.push_back(std::make_unique<Fiber>());
  block.barrier = block.cluster = Barrier{};
  block.warps.assign(size.x / 32, Warp{});
  block.live = size.x;
  for (unsigned t = 0; t < size.x; ++t) {
    Fiber& fiber = *block.fibers[t];
    static_cast<Thread&>(fiber) = {dim3(t, 0, 0), index, size, grid};
    fiber.started = fiber.done = false;
    fiber.waits_for = nullptr;
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.get();
    fiber.start.uc_stack.ss_size = kStackBytes;
    makecontext(&fiber.start, enter, 0);
  }
}

[[noreturn]] void stuck(const char* what) {
  std::fprintf(stderr, "emulator: threads wait for a %s that others never reach\n", what);
  std::abort();
}

// Until the block ends or waits for its cluster.
void run_block(unsigned threads) {
  std::vector<unsigned> turn(threads);
  std::iota(turn.begin(), turn.end(), 0u);
  while (running->live > 0 && !running->waits_for_cluster()) {
    std::shuffle(turn.begin(), turn.end(), order);
    bool progress = false;
    for (unsigned i : turn) {
      Fiber& fiber = *running->fibers[i];
      if (fiber.done || fiber.blocked()) continue;
      progress = true;
      resume(fiber);
    }
    if (!progress) stuck("barrier");
  }
}

void run_cluster(unsigned threads) {
  std::vector<unsigned> turn(blocks.size());
  std::iota(turn.begin(), turn.end(), 0u);
  const SharedMemory& memory = shared_memory();
  for (Block& block : blocks) block.shared.assign(memory.size, '\x5a');
  for (bool live = true; live;) {
    std::shuffle(turn.begin(), turn.end(), order);
    unsigned waiting = 0;
    live = false;
    for (unsigned b : turn) {
      running = &blocks[b];
      if (running->live == 0) continue;
      std::memcpy(memory.data, running->shared.data(), memory.size);
      run_block(threads);
      std::memcpy(running->shared.data(), memory.data, memory.size);
      live |= running->live > 0;
      waiting += running->live > 0;
    }
    if (waiting != 0 && waiting != blocks.size()) stuck("cluster");
    for (Block& block : blocks) {
      block.cluster.arrived = 0;
      ++block.cluster.generation;
    }
  }
}

}  // namespace

void run(unsigned cluster, dim3 grid, dim3 block, const std::function<void()>& kernel) {
  if (block.x % 32 != 0 || block.y * block.z != 1 || grid.x % cluster != 0) std::abort();
  body = &kernel;
  blocks.resize(cluster);
  std::vector<unsigned> turn(grid.x * grid.y * grid.z / cluster);
  std::iota(turn.begin(), turn.end(), 0u);
  std::shuffle(turn.begin(), turn.end(), order);
  for (unsigned first : turn) {
    for (unsigned r = 0; r < cluster; ++r) {
      const unsigned b = first * cluster + r;
      start(blocks[r], dim3(b % grid.x, b / grid.x % grid.y, b / grid.x / grid.y), block, grid);
    }
    running = &blocks[0];
    cluster == 1 ? run_block(block.x) : run_cluster(block.x);
  }
}

void block_barrier() { arrive(running->barrier, running->live); }

void cluster_barrier() {
  Fiber& fiber = self();
  fiber.waits_for = &running->cluster;
  fiber.waits_while = running->cluster.generation;
  ++running->cluster.arrived;
  if (_setjmp(fiber.resume) == 0) _longjmp(scheduler, 1);
}

unsigned cluster_rank() { return static_cast<unsigned>(running - blocks.data()); }

void* shared_of(unsigned rank, void* mine) {
  if (rank == cluster_rank()) return mine;
  return blocks[rank].shared.data() + (static_cast<char*>(mine) - shared_memory().data);
}

const uint64_t* exchange(uint64_t word) {
  Warp& warp = running->warps[current->index.x / 32];
  // Two sets of words: nobody writes a set before all have left the exchange that read it.
  uint64_t* words = warp.words[warp.generation % 2];
  words[lane()] = word;
  arrive(warp, 32);
  return words;
}

}  // namespace emulator

extern "C" __attribute__((visibility("default"))) void emulator_seed(unsigned seed) { emulator::order.seed(seed); }
