// Sums over the ranks of one host through memory that all of them have mapped.
//
//     memory:  a Place for each rank | slots of even turns, one for each rank | slots of odd turns
//
// In each turn every rank copies its summand into its slot, announces the turn, waits until all ranks have, and adds all
// slots in the order of ranks, so all get the same bits. A slot is reused two turns later: by then all ranks have
// announced the turn between and so finished reading. A wait spins for a while, then sleeps on a futex.
#if defined(__linux__)
#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <cstring>
#include <ctime>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr int64_t SPIN_US = 40;  // about the time of a sleep and a wake
constexpr int64_t STRIP = 2048;  // numbers that fit the L1 cache while they are added

struct alignas(64) Place {
    std::atomic<uint32_t> turn;      // the last turn that the rank announced
    std::atomic<uint32_t> sleepers;  // ranks that sleep until `turn` changes
};
static_assert(std::atomic<uint32_t>::is_always_lock_free, "ranks are processes");

using Clock = std::chrono::steady_clock;

bool has_announced(const Place& place, uint32_t turn) { return int32_t(place.turn.load() - turn) >= 0; }

void futex(std::atomic<uint32_t>* word, int what, uint32_t value, const timespec* patience) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), what, value, patience, nullptr, 0);
}

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

bool wait_for(Place& place, uint32_t turn, Clock::time_point deadline) {
    if (has_announced(place, turn)) return true;
    const auto spun = Clock::now() + std::chrono::microseconds(SPIN_US);
    while (Clock::now() < spun)
        for (int i = 0; i < 16; i++, pause())
            if (has_announced(place, turn)) return true;
    place.sleepers.fetch_add(1);
    bool come = false;
    while (!come) {
        const uint32_t seen = place.turn.load();
        const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(deadline - Clock::now()).count();
        come = int32_t(seen - turn) >= 0;
        if (come || left <= 0) break;
        const timespec patience{left / 1000000000, left % 1000000000};
        futex(&place.turn, FUTEX_WAIT, seen, &patience);
    }
    place.sleepers.fetch_sub(1);
    return come;
}

}  // namespace

extern "C" {

// x becomes the sum of all ranks' x, `count` numbers that fit a slot. *missing is -1, or a rank that did not announce within
// `timeout_us`: call again for the same turn with `announce` 0 to continue waiting.
void diptych_shared_sum(char* memory, int64_t rank, int64_t ranks, int64_t slot_numbers, float* x, int64_t count,
                        int64_t turn, int64_t announce, int64_t timeout_us, int64_t* missing) {
    auto* places = reinterpret_cast<Place*>(memory);
    auto* slots = reinterpret_cast<float*>(memory + ranks * sizeof(Place)) + (turn & 1) * ranks * slot_numbers;
    if (announce) {
        std::memcpy(slots + rank * slot_numbers, x, count * sizeof(float));
        places[rank].turn.store(uint32_t(turn));
        if (places[rank].sleepers.load()) futex(&places[rank].turn, FUTEX_WAKE, INT_MAX, nullptr);
    }
    const auto deadline = Clock::now() + std::chrono::microseconds(timeout_us);
    for (int64_t other = 0; other < ranks; other++)
        if (!wait_for(places[other], uint32_t(turn), deadline)) {
            *missing = other;
            return;
        }
    *missing = -1;
    for (int64_t start = 0; start < count; start += STRIP) {
        const int64_t end = std::min(start + STRIP, count);
        const float* second = slots + slot_numbers;
        for (int64_t i = start; i < end; i++) x[i] = slots[i] + second[i];
        for (int64_t other = 2; other < ranks; other++) {
            const float* summand = slots + other * slot_numbers;
            for (int64_t i = start; i < end; i++) x[i] += summand[i];
        }
    }
}

}  // extern "C"
#endif
