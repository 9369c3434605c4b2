// Megatron-LM's sample order and blend, computed in pieces and called through ctypes.
//
// This file is a separate library that needs only the C++ standard library; the library of the .cpp files needs torch.
// Every function continues from a state that the caller owns and updates it, so no memory is allocated here.

#include <algorithm>
#include <cstdint>
#include <utility>

namespace {

// The generator of numpy's RandomState: Matsumoto and Nishimura, "Mersenne Twister", 1998.
struct Twister {
    static constexpr int words = 624, middle = 397;
    uint32_t* key;     // (624,)
    int32_t position;  // of the next word; 624 if all are used

    static uint32_t twisted(uint32_t high, uint32_t low) {
        const uint32_t mixed = (high & 0x80000000u) | (low & 0x7fffffffu);
        return (mixed >> 1) ^ (-(low & 1u) & 0x9908b0dfu);
    }

    void renew() {
        for (int i = 0; i < words - middle; ++i) key[i] = key[i + middle] ^ twisted(key[i], key[i + 1]);
        for (int i = words - middle; i < words - 1; ++i)
            key[i] = key[i + middle - words] ^ twisted(key[i], key[i + 1]);
        key[words - 1] = key[middle - 1] ^ twisted(key[words - 1], key[0]);
        position = 0;
    }

    uint32_t next() {
        if (position == words) renew();
        uint32_t word = key[position++];
        word ^= word >> 11;
        word ^= (word << 7) & 0x9d2c5680u;
        word ^= (word << 15) & 0xefc60000u;
        return word ^ (word >> 18);
    }

    // A number in [0, last], drawn as by numpy's random_interval; `mask` covers the bits of `last`.
    uint64_t below(uint64_t last, uint64_t mask) {
        uint64_t value;
        do {
            value = next();
            if (last > 0xffffffffu) value = (value << 32) | next();
        } while ((value &= mask) > last);
        return value;
    }
};

// Shuffles as numpy does: swaps the last element with a random one up to it, then the one before, and so on. The
// random elements are drawn ahead of the swaps, to prefetch their memory.
template <typename T>
void shuffle(T* values, int64_t size, Twister& random) {
    constexpr int ahead = 64;
    int64_t partners[ahead];
    uint64_t mask = 1;
    while (mask < uint64_t(std::max<int64_t>(size - 1, 1))) mask = mask << 1 | 1;
    for (int64_t last = size - 1; last > 0;) {
        const int count = int(std::min<int64_t>(ahead, last));
        for (int k = 0; k < count; ++k) {
            const uint64_t limit = uint64_t(last - k);
            while (mask >> 1 >= limit) mask >>= 1;
            partners[k] = int64_t(random.below(limit, mask));
            __builtin_prefetch(values + partners[k], 1);
        }
        for (int k = 0; k < count; ++k) std::swap(values[last - k], values[partners[k]]);
        last -= count;
    }
}

struct Progress {
    int64_t document, position, sample;  // the next document, the index of its first token, the next sample
};

template <typename T>
int64_t fill_sample_index(
    T* rows, int64_t size, const int32_t* lengths, const int32_t* documents, int64_t count, int64_t seq_length,
    Progress& progress) {
    constexpr int64_t ahead = 32;
    int64_t filled = 0;
    Progress at = progress;
    for (; at.document < count; ++at.document) {
        if (at.document + ahead < count) __builtin_prefetch(lengths + documents[at.document + ahead]);
        const int64_t end = at.position + lengths[documents[at.document]];
        int64_t first = at.sample * seq_length;
        for (; first < end && filled < size; first += seq_length, ++at.sample, ++filled) {
            rows[2 * filled] = T(at.document);
            rows[2 * filled + 1] = T(first - at.position);
        }
        if (first < end) break;  // the rows are full, but more samples begin in this document
        at.position = end;
    }
    progress = at;
    return filled;
}

typedef double Four __attribute__((vector_size(32)));
typedef int64_t Indexes __attribute__((vector_size(32)));
constexpr int fours = 4, lanes = 4 * fours;  // independent draws; a single one would wait for each result

// Draws `steps` samples in each lane: from the data set furthest behind its weight, the first one if several are.
// counts (sets, fours) are updated; `which` and `numbers` have one row per lane.
template <typename T>
inline __attribute__((always_inline)) void draw(
    const double* weights, Four* counts, int64_t sets, const int64_t* firsts, int64_t steps, int16_t* const* which,
    T* const* numbers) {
    constexpr Four ones = {1, 1, 1, 1}, zeros = {};
    Four sample[fours];
    Indexes chosen[fours];
    for (int lane = 0; lane < lanes; ++lane) {
        sample[lane / 4][lane % 4] = double(firsts[lane]);
        chosen[lane / 4][lane % 4] = -1;  // none yet
    }
    const double* count_of = reinterpret_cast<const double*>(counts);
    for (int64_t step = 0; step < steps; ++step) {
        Four share[fours], most[fours];
        Indexes before[fours];
        for (int four = 0; four < fours; ++four) {
            share[four] = sample[four] < ones ? ones : sample[four];
            before[four] = chosen[four];
            const Four count = counts[four] + (before[four] == 0 ? ones : zeros);
            counts[four] = count;
            most[four] = weights[0] * share[four] - count;
            chosen[four] = Indexes{};
            sample[four] += ones;
        }
        Indexes index = {};
        for (int64_t set = 1; set < sets; ++set) {
            index += 1;
            for (int four = 0; four < fours; ++four) {
                const Four count = counts[fours * set + four] + (before[four] == index ? ones : zeros);
                counts[fours * set + four] = count;
                const Four behind = weights[set] * share[four] - count;
                const Indexes more = behind > most[four];  // a mask: all bits are set in lanes where it is true
                chosen[four] = more ? index : chosen[four];
                most[four] = more ? behind : most[four];
            }
        }
        for (int lane = 0; lane < lanes; ++lane) {
            const int64_t set = chosen[lane / 4][lane % 4];
            which[lane][step] = int16_t(set);
            numbers[lane][step] = T(count_of[set * lanes + lane]);
        }
    }
    for (int64_t set = 0; set < sets; ++set)
        for (int four = 0; four < fours; ++four)
            counts[fours * set + four] += chosen[four] == Indexes{} + set ? ones : zeros;
}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

}  // namespace

extern "C" {

// Shuffles values (size,) of `width` bytes; key (624,) and position are RandomState's, and are updated.
void shuffle_values(void* values, int64_t width, int64_t size, uint32_t* key, int32_t* position) {
    Twister random{key, *position};
    if (width == 4) shuffle(static_cast<uint32_t*>(values), size, random);
    if (width == 8) shuffle(static_cast<uint64_t*>(values), size, random);
    *position = random.position;
}

// Fills rows (size, 2) of `width` bytes and returns the number of filled rows, which is below `size` if the documents
// end. progress (3,) is updated.
int64_t sample_rows(
    void* rows, int64_t width, int64_t size, const int32_t* lengths, const int32_t* documents, int64_t count,
    int64_t seq_length, int64_t* progress) {
    Progress at{progress[0], progress[1], progress[2]};
    const int64_t filled =
        width == 4
            ? fill_sample_index(static_cast<int32_t*>(rows), size, lengths, documents, count, seq_length, at)
            : fill_sample_index(static_cast<int64_t*>(rows), size, lengths, documents, count, seq_length, at);
    progress[0] = at.document, progress[1] = at.position, progress[2] = at.sample;
    return filled;
}

// Draws `steps` samples in each of 16 lanes, which begin at firsts (16,). counts (sets, 16), aligned to 32 bytes, is
// updated. `which` and `numbers` have 16 rows of `steps` elements; numbers have `width` bytes.
FOR_EACH_PROCESSOR void draw_samples(
    const double* weights, void* counts, int64_t sets, const int64_t* firsts, int64_t steps, int16_t* const* which,
    void* const* numbers, int64_t width) {
    Four* counted = static_cast<Four*>(counts);
    if (width == 4)
        draw(weights, counted, sets, firsts, steps, which, reinterpret_cast<int32_t* const*>(numbers));
    else
        draw(weights, counted, sets, firsts, steps, which, reinterpret_cast<int64_t* const*>(numbers));
}

}  // extern "C"
