// SPDX-License-Identifier: MIT OR Apache-2.0
// Sums, broadcasts and gathers between the processes of one host, through a segment of memory that all of them have
// mapped.
//
// The segment: a header, a line of counters for each rank, and two slots for each rank. Only a rank itself writes its
// line's counters (but `sleepers`) and its slots. Payloads go through the slots chunk by chunk, in turns through one and the
// other. Zeros are a segment's first state.
//
// Rules.
// - Every rank enters the same operations, of the same sizes, in the same order. So all ranks' `stage`, which counts the
//   steps of chunks that a rank has done, tell the same moments by the same numbers.
// - A slot is written for chunk n only when every rank has begun chunk n - 1: then all have done with chunk n - 2, which
//   was the last one in this slot.
// - Of a small chunk every rank adds up everything. Of a large one each adds up its part, leaves the sum in its slot, and
//   takes the others' parts from theirs. Either way ranks are added in their order, in fp32, and rounded once.
// - No call lasts much longer than its timeout. One that ends with NOT_YET is called again with the same arguments and
//   goes on where it was. A wait spins for a while and then sleeps on the counter that it waits for.
// - Not thread-safe: one thread of a process uses its end.
//
// Leaves out: how the segment comes to the processes, and who looks after those that died.

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstring>
#include <new>

#include "api.h"
#include "kernels.h"

namespace {

enum Outcome : int32_t { DONE = 0, NOT_YET = 1, LEFT = 2 };  // LEFT: a rank that is needed has left for good

constexpr uint64_t MAGIC = 0x4d525348'00000001;  // changes with the layout
constexpr int MAX_RANKS = 1024;  // of one host
constexpr size_t PAGE = 4096;
constexpr size_t LINE = 128;  // processors fetch lines of 64 bytes in pairs
// Adding up everything costs one meeting, and in parts two, of which each moves less. Parts pay from four ranks on, for
// more than this. (Two ranks on two cores of one processor: everything is 1.7 times faster at any size.)
constexpr int MAX_RANKS_WITHOUT_PARTS = 3;
constexpr int64_t MAX_BYTES_WITHOUT_PARTS = 16 * 1024;
constexpr int64_t PART_ITEMS = 64;  // parts begin at whole lines, whatever the format
constexpr int SPINS_PER_LOOK = 32;  // between two looks at the clock
// After so long, a spinning rank lets others run at each look: the one that it waits for may be on the same core.
constexpr int64_t YIELD_AFTER_NS = 5000;

struct Header {
    uint64_t magic, token;
    int64_t slot_bytes;
    int32_t world;
};

struct alignas(LINE) Counters {
    std::atomic<uint32_t> stage;     // steps that the rank has done, modulo 2**32
    std::atomic<uint32_t> sleepers;  // others that sleep until it changes; too many after one was killed in its sleep
    std::atomic<uint32_t> left;
};
static_assert(std::atomic<uint32_t>::is_always_lock_free, "counters are shared between processes");
static_assert(sizeof(Header) <= LINE && sizeof(Counters) == LINE, "the layout");

int64_t bytes_of(int32_t format) { return format == FP32 ? 4 : 2; }

size_t slots_at(int world) { return (LINE + size_t(world) * LINE + PAGE - 1) / PAGE * PAGE; }

int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return int64_t(now.tv_sec) * 1000000000 + now.tv_nsec;
}

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");
#endif
}

void sleep_on(std::atomic<uint32_t>& word, uint32_t value, int64_t limit_ns) {
    timespec limit{time_t(limit_ns / 1000000000), long(limit_ns % 1000000000)};
    syscall(SYS_futex, &word, FUTEX_WAIT, value, &limit, nullptr, 0);  // returns at once where it has changed already
}

void wake_all(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

// Where a rank is in its operation, between two calls of it.
enum class At { ENTRY, GIVEN, ADDED };

// One rank's end.
class End {
  public:
    End(char* memory, int rank, int64_t spin_ns) : memory_(memory), rank_(rank), spin_ns_(spin_ns) {
        const Header* header = reinterpret_cast<const Header*>(memory);
        world_ = header->world;
        slot_bytes_ = header->slot_bytes;
        std::memset(slot(rank, 0), 0, size_t(2 * slot_bytes_));  // whoever touches memory first has it near
    }

    int32_t sum(char* data, int64_t items, int32_t format, int64_t timeout_ns) {
        set_deadline(timeout_ns);
        const int64_t item_bytes = bytes_of(format), per_chunk = slot_bytes_ / item_bytes;
        while (done_ < items) {
            int64_t count = std::min(items - done_, per_chunk);
            int32_t outcome = sum_chunk(data + done_ * item_bytes, count, format);
            if (outcome != DONE) return outcome;
            end_chunk(count);
        }
        done_ = 0;
        return DONE;
    }

    int32_t broadcast(int root, char* data, int64_t bytes, int64_t timeout_ns) {
        set_deadline(timeout_ns);
        while (done_ < bytes) {
            int64_t count = std::min(bytes - done_, slot_bytes_);
            int32_t outcome = broadcast_chunk(root, data + done_, count);
            if (outcome != DONE) return outcome;
            end_chunk(count);
        }
        done_ = 0;
        return DONE;
    }

    // `out` is the root's alone: what rank n has goes to n * bytes.
    int32_t gather(int root, const char* data, int64_t bytes, char* out, int64_t timeout_ns) {
        set_deadline(timeout_ns);
        while (done_ < bytes) {
            int64_t count = std::min(bytes - done_, slot_bytes_);
            int32_t outcome = gather_chunk(root, data + done_, count, rank_ == root ? out + done_ : nullptr, bytes);
            if (outcome != DONE) return outcome;
            end_chunk(count);
        }
        done_ = 0;
        return DONE;
    }

    int32_t awaited() const { return awaited_; }

    void leave() {
        counters(rank_).left.store(1);
        wake_all(counters(rank_).stage);
    }

  private:
    int32_t sum_chunk(char* data, int64_t items, int32_t format) {
        const int64_t item_bytes = bytes_of(format), bytes = items * item_bytes;
        const bool small = world_ <= MAX_RANKS_WITHOUT_PARTS || bytes <= MAX_BYTES_WITHOUT_PARTS;
        if (at_ == At::ENTRY) {
            int32_t outcome = wait_for_all(begun_);
            if (outcome != DONE) return outcome;
            give(data, items, item_bytes, small);
            begin_chunk();
        }
        if (at_ == At::GIVEN) {
            int32_t outcome = wait_for_all(stage_);
            if (outcome != DONE) return outcome;
            if (small) {
                add(data, data, 0, items, item_bytes, format);
                return DONE;
            }
            add_own_part(data, items, item_bytes, format);
            advance();
            at_ = At::ADDED;
        }
        int32_t outcome = wait_for_all(stage_);
        if (outcome == DONE) take_parts(data, items, item_bytes);
        return outcome;
    }

    int32_t broadcast_chunk(int root, char* data, int64_t bytes) {
        if (at_ == At::ENTRY) {
            if (rank_ == root) {
                int32_t outcome = wait_for_all(begun_);
                if (outcome != DONE) return outcome;
                std::memcpy(slot(rank_, turn_), data, size_t(bytes));
            }
            begin_chunk();
        }
        if (rank_ == root) return DONE;
        int32_t outcome = wait_for(root, stage_);
        if (outcome == DONE) std::memcpy(data, slot(root, turn_), size_t(bytes));
        return outcome;
    }

    int32_t gather_chunk(int root, const char* data, int64_t count, char* out, int64_t stride) {
        if (at_ == At::ENTRY) {
            if (rank_ != root) {
                int32_t outcome = wait_for_all(begun_);
                if (outcome != DONE) return outcome;
                std::memcpy(slot(rank_, turn_), data, size_t(count));
            }
            begin_chunk();
        }
        for (int rank = 0; rank < world_ && rank_ == root; rank++) {
            int32_t outcome = rank == root ? int32_t(DONE) : wait_for(rank, stage_);
            if (outcome != DONE) return outcome;
            std::memcpy(out + rank * stride, rank == root ? data : slot(rank, turn_), size_t(count));
        }
        return DONE;
    }

    // What the others need of this rank's payload: of a large one all but the part that it adds up itself.
    void give(const char* data, int64_t items, int64_t item_bytes, bool small) {
        int64_t from = small ? items : part_begin(rank_, items), to = small ? items : part_begin(rank_ + 1, items);
        char* mine = slot(rank_, turn_);
        std::memcpy(mine, data, size_t(from * item_bytes));
        std::memcpy(mine + to * item_bytes, data + to * item_bytes, size_t((items - to) * item_bytes));
    }

    void add(const char* own, char* out, int64_t from, int64_t to, int64_t item_bytes, int32_t format) {
        const void* in[MAX_RANKS];
        for (int rank = 0; rank < world_; rank++)
            in[rank] = (rank == rank_ ? own : slot(rank, turn_)) + from * item_bytes;
        add_up_(in, world_, to - from, format, out + from * item_bytes);
    }

    void add_own_part(char* data, int64_t items, int64_t item_bytes, int32_t format) {
        int64_t from = part_begin(rank_, items), to = part_begin(rank_ + 1, items);
        add(data, data, from, to, item_bytes, format);
        std::memcpy(slot(rank_, turn_) + from * item_bytes, data + from * item_bytes, size_t((to - from) * item_bytes));
    }

    void take_parts(char* data, int64_t items, int64_t item_bytes) {
        for (int rank = 0; rank < world_; rank++) {
            if (rank == rank_) continue;
            int64_t from = part_begin(rank, items) * item_bytes, to = part_begin(rank + 1, items) * item_bytes;
            std::memcpy(data + from, slot(rank, turn_) + from, size_t(to - from));
        }
    }

    int64_t part_begin(int rank, int64_t items) const {
        if (rank == world_) return items;
        return items * rank / world_ / PART_ITEMS * PART_ITEMS;
    }

    void begin_chunk() {
        advance();
        at_ = At::GIVEN;
        begins_ = stage_;
    }

    void end_chunk(int64_t count) {
        at_ = At::ENTRY;
        begun_ = begins_;
        turn_ = 1 - turn_;
        done_ += count;
    }

    void advance() {
        Counters& mine = counters(rank_);
        mine.stage.store(++stage_);  // in one order with `sleepers`, so that nobody falls asleep unseen
        if (mine.sleepers.load() != 0) wake_all(mine.stage);
    }

    int32_t wait_for_all(uint32_t stage) {
        for (int rank = 0; rank < world_; rank++) {
            if (rank == rank_ || has_reached(rank, stage)) continue;
            int32_t outcome = wait_for(rank, stage);
            if (outcome != DONE) return outcome;
        }
        return DONE;
    }

    int32_t wait_for(int rank, uint32_t stage) {
        if (has_reached(rank, stage)) return DONE;
        awaited_ = rank;
        const int64_t began = now_ns(), spin_until = std::min(began + spin_ns_, deadline_ns_);
        for (;;) {
            for (int spins = 0; spins < SPINS_PER_LOOK; spins++) {
                if (has_reached(rank, stage)) return DONE;
                relax();
            }
            int64_t now = now_ns();
            if (now >= spin_until) sleep_until_change(rank, stage, deadline_ns_ - now);
            else if (now >= began + YIELD_AFTER_NS) sched_yield();
            // In this order: a rank that leaves has done its steps before.
            bool has_left = counters(rank).left.load(std::memory_order_acquire) != 0;
            if (has_reached(rank, stage)) return DONE;
            if (has_left) return LEFT;
            if (now_ns() >= deadline_ns_) return NOT_YET;
        }
    }

    void sleep_until_change(int rank, uint32_t stage, int64_t limit_ns) {
        Counters& theirs = counters(rank);
        if (limit_ns <= 0) return;
        theirs.sleepers.fetch_add(1);
        uint32_t seen = theirs.stage.load();
        if (int32_t(seen - stage) < 0 && theirs.left.load() == 0) sleep_on(theirs.stage, seen, limit_ns);
        theirs.sleepers.fetch_sub(1);
    }

    bool has_reached(int rank, uint32_t stage) const {
        return int32_t(counters(rank).stage.load(std::memory_order_acquire) - stage) >= 0;
    }

    void set_deadline(int64_t timeout_ns) { deadline_ns_ = now_ns() + timeout_ns; }

    Counters& counters(int rank) const {
        return *reinterpret_cast<Counters*>(memory_ + LINE + size_t(rank) * LINE);
    }

    char* slot(int rank, int turn) const {
        return memory_ + slots_at(world_) + (size_t(rank) * 2 + size_t(turn)) * size_t(slot_bytes_);
    }

    char* memory_;
    int rank_, world_;
    decltype(Kernels::add_up) add_up_ = running_kernels()->add_up;
    int64_t spin_ns_, slot_bytes_;
    int64_t deadline_ns_ = 0;
    int64_t done_ = 0;     // of the operation's items or bytes
    uint32_t stage_ = 0;   // what this rank's counter says
    uint32_t begins_ = 0;  // the stage at which this chunk began
    uint32_t begun_ = 0;   // and the one before it
    int turn_ = 0;         // which of the two slots
    int awaited_ = 0;
    At at_ = At::ENTRY;
};

End& end_of(void* end) { return *static_cast<End*>(end); }

}  // namespace

// Bytes of a segment for so many ranks; slots are whole pages. 0 where there can be none.
MR_API int64_t mr_shared_size(int32_t world, int64_t slot_bytes) {
    if (world < 1 || world > MAX_RANKS || slot_bytes < int64_t(PAGE) || slot_bytes % int64_t(PAGE)) return 0;
    return int64_t(slots_at(world)) + 2 * world * slot_bytes;
}

// Make a segment of zeroed memory. `token` tells it from any other one.
MR_API void mr_shared_format(void* memory, int32_t world, int64_t slot_bytes, uint64_t token) {
    *static_cast<Header*>(memory) = Header{MAGIC, token, slot_bytes, world};
}

// A rank's end of a segment of `bytes` bytes; null where it is not the one meant, or for another number of ranks. Waits
// spin for `spin_us` before they sleep.
MR_API void* mr_shared_open(void* memory, int64_t bytes, uint64_t token, int32_t rank, int32_t world, int64_t spin_us) {
    const Header* header = static_cast<const Header*>(memory);
    if (bytes < int64_t(sizeof(Header)) || header->magic != MAGIC || header->token != token) return nullptr;
    if (running_kernels() == nullptr || header->world != world || rank < 0 || rank >= world) return nullptr;
    if (mr_shared_size(world, header->slot_bytes) != bytes) return nullptr;
    return new (std::nothrow) End(static_cast<char*>(memory), rank, spin_us * 1000);
}

// Sum `items` items of `format` (FP32, BF16 or FP16) over the ranks, in place.
MR_API int32_t mr_shared_sum(void* end, void* data, int64_t items, int32_t format, int64_t timeout_us) {
    return end_of(end).sum(static_cast<char*>(data), items, format, timeout_us * 1000);
}

// Give every rank what `root` has at `data`.
MR_API int32_t mr_shared_broadcast(void* end, int32_t root, void* data, int64_t bytes, int64_t timeout_us) {
    return end_of(end).broadcast(root, static_cast<char*>(data), bytes, timeout_us * 1000);
}

// Give `root` what every rank has at `data`: rank n's at `out` + n * bytes, which is null elsewhere.
MR_API int32_t mr_shared_gather(void* end, int32_t root, const void* data, int64_t bytes, void* out, int64_t timeout_us) {
    return end_of(end).gather(root, static_cast<const char*>(data), bytes, static_cast<char*>(out), timeout_us * 1000);
}

// The rank that was waited for last.
MR_API int32_t mr_shared_awaited(void* end) { return end_of(end).awaited(); }

// Tell the others that this rank will do nothing more, and let the end go. The memory stays.
MR_API void mr_shared_close(void* end) {
    end_of(end).leave();
    delete &end_of(end);
}
