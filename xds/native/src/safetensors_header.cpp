// A strict JSON reader for the safetensors header, and every check that can be made before data moves.
//
// Errors of grammar and type are reported where the text has them first; errors of layout blame the first tensor in
// file order, so that the same file gives the same message every time.
#include "safetensors_header.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <ctime>
#include <memory>
#include <new>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

namespace {

constexpr unsigned kMaxNesting = 128;
constexpr unsigned kMaxDimensions = 64;  // what NumPy can hold
constexpr uint64_t kU64Max = UINT64_MAX;

struct DataType {
    std::string_view name;
    unsigned bits;
};
constexpr DataType kDataTypes[] = {
    {"BOOL", 8},    {"F4", 4},      {"F6_E2M3", 6},     {"F6_E3M2", 6},     {"U8", 8},   {"I8", 8},   {"F8_E5M2", 8},
    {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"I16", 16}, {"U16", 16}, {"F16", 16},
    {"BF16", 16},   {"I32", 32},    {"U32", 32},        {"F32", 32},        {"C64", 64}, {"F64", 64}, {"I64", 64},
    {"U64", 64},
};

struct Failure {
    int status;
    std::string message;
};

[[noreturn]] void fail(std::string message) { throw Failure{XDS_SAFETENSORS_INVALID, std::move(message)}; }

std::string number(uint64_t value) { return std::to_string(value); }

// A name as messages show it: quoted, control characters escaped, shortened at a character boundary.
std::string quoted(std::string_view text) {
    constexpr size_t kShown = 200;
    bool cut = text.size() > kShown;
    if (cut) {
        size_t keep = kShown;
        while (keep > 0 && (static_cast<unsigned char>(text[keep]) & 0xC0) == 0x80) --keep;
        text = text.substr(0, keep);
    }
    std::string out = "'";
    for (char c : text) {
        auto byte = static_cast<unsigned char>(c);
        if (byte < 0x20 || byte == 0x7F) {
            constexpr char kHex[] = "0123456789abcdef";
            out += "\\x";
            out += kHex[byte >> 4];
            out += kHex[byte & 15];
        } else {
            out += c;
        }
    }
    return out + (cut ? "...'" : "'");
}

// Position of the first byte that is not UTF-8, or text.size().
size_t utf8_error(std::string_view text) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(text.data());
    size_t size = text.size(), at = 0;
    while (at < size) {
        uint64_t word;
        while (at + 8 <= size && (std::memcpy(&word, bytes + at, 8), (word & 0x8080808080808080u) == 0)) at += 8;
        if (at == size) break;
        unsigned lead = bytes[at];
        if (lead < 0x80) {
            ++at;
            continue;
        }
        size_t more = lead >= 0xC2 && lead <= 0xDF ? 1 : lead >= 0xE0 && lead <= 0xEF ? 2 : lead >= 0xF0 && lead <= 0xF4 ? 3 : 0;
        if (more == 0 || size - at <= more) return at;
        for (size_t i = 1; i <= more; ++i)
            if ((bytes[at + i] & 0xC0) != 0x80) return at;
        unsigned second = bytes[at + 1];
        bool overlong = (lead == 0xE0 && second < 0xA0) || (lead == 0xF0 && second < 0x90);
        bool surrogate = lead == 0xED && second > 0x9F;
        bool beyond = lead == 0xF4 && second > 0x8F;
        if (overlong || surrogate || beyond) return at;
        at += more + 1;
    }
    return size;
}

// Set of strings that lie one after the other in a growing buffer; says whether a string was there before.
// The seed differs in each process, so that no file can be made whose names all collide.
class NameSet {
public:
    explicit NameSet(const std::string& buffer, size_t expected = 0) : buffer_(buffer) {
        static const uint64_t seed = [] {
            timespec now{};
            clock_gettime(CLOCK_MONOTONIC, &now);
            return static_cast<uint64_t>(now.tv_nsec) * 0x9E3779B97F4A7C15u ^ reinterpret_cast<uintptr_t>(&now) ^
                   static_cast<uint64_t>(now.tv_sec) << 40;
        }();
        seed_ = seed | 1;
        if (expected) {
            slots_.resize(std::bit_ceil(2 * expected + 64));
            members_.reserve(expected);
        }
    }
    bool insert(uint64_t offset, uint64_t nbytes) {
        if (members_.size() * 2 >= slots_.size()) grow();
        std::string_view text = std::string_view(buffer_).substr(offset, nbytes);
        uint64_t hash = hash_of(text);
        size_t mask = slots_.size() - 1;
        size_t at = hash & mask;
        auto tag = static_cast<uint32_t>(hash >> 32);
        for (; slots_[at].member; at = (at + 1) & mask) {
            if (slots_[at].tag != tag) continue;
            const Member& other = members_[slots_[at].member - 1];
            if (std::string_view(buffer_).substr(other.offset, other.nbytes) == text) return false;
        }
        if (members_.size() >= UINT32_MAX - 1) fail("more than 4294967294 keys");
        members_.push_back({offset, nbytes, hash});
        slots_[at] = {tag, static_cast<uint32_t>(members_.size())};
        return true;
    }

private:
    struct Member {
        uint64_t offset, nbytes, hash;
    };
    struct Slot {
        uint32_t tag, member;  // member counts from 1; 0 is an empty slot
    };
    static uint64_t fold(uint64_t a, uint64_t b) {
        __extension__ using u128 = unsigned __int128;
        u128 product = static_cast<u128>(a) * b;
        return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
    }
    uint64_t hash_of(std::string_view text) const {
        uint64_t hash = seed_ ^ text.size();
        while (!text.empty()) {
            uint64_t word = 0;
            size_t take = std::min<size_t>(8, text.size());
            std::memcpy(&word, text.data(), take);
            hash = fold(word ^ hash, seed_ ^ 0xA0761D6478BD642Fu) ^ (hash >> 7);
            text.remove_prefix(take);
        }
        return fold(hash ^ 0xE7037ED1A0B428DBu, seed_);
    }
    void grow() {
        slots_.assign(slots_.empty() ? 64 : slots_.size() * 2, Slot{});
        size_t mask = slots_.size() - 1;
        for (size_t i = 0; i < members_.size(); ++i) {
            size_t at = members_[i].hash & mask;
            while (slots_[at].member) at = (at + 1) & mask;
            slots_[at] = {static_cast<uint32_t>(members_[i].hash >> 32), static_cast<uint32_t>(i + 1)};
        }
    }
    const std::string& buffer_;
    std::vector<Slot> slots_;
    std::vector<Member> members_;
    uint64_t seed_ = 0;
};

struct Tensor {
    uint64_t begin = 0, end = 0, name_offset = 0, name_nbytes = 0, shape_offset = 0;
    uint8_t dtype = 0, ndim = 0;
};

// Characters that end the plain run of a string: the quote, the backslash, control characters.
constexpr uint64_t each(uint64_t byte) { return byte * 0x0101010101010101u; }
constexpr uint64_t zero_bytes(uint64_t word) { return (word - each(1)) & ~word & each(0x80); }
constexpr uint64_t stops_in(uint64_t word) {
    return zero_bytes(word ^ each('"')) | zero_bytes(word ^ each('\\')) | ((word - each(0x20)) & ~word & each(0x80));
}
constexpr auto kStops = [] {
    struct {
        bool is[256];
    } table{};
    for (unsigned c = 0; c < 0x20; ++c) table.is[c] = true;
    table.is[unsigned{'"'}] = table.is[unsigned{'\\'}] = true;
    return table;
}();

class Parser {
public:
    explicit Parser(std::string_view json) : begin_(json.data()), at_(begin_), end_(begin_ + json.size()) {}

    std::vector<Tensor> tensors;
    std::vector<uint64_t> shapes;
    std::string names;
    std::string metadata;
    std::vector<uint64_t> metadata_end;

    void parse() {
        skip_space();
        if (at_ == end_) fail_here("the header is empty; expected a JSON object");
        expect('{', "expected '{', the start of a JSON object");
        // A tensor takes some 100 bytes of text; space for as many spares the tables their growth. Bounded, as padding counts.
        size_t expected = std::min<size_t>(static_cast<size_t>(end_ - begin_) / 100, 1 << 20);
        tensors.reserve(expected);
        shapes.reserve(2 * expected);
        names.reserve(static_cast<size_t>(end_ - begin_) / 2);
        NameSet seen(names, expected);
        bool has_metadata = false;
        if (!try_take('}')) {
            do {
                skip_space();
                const char* where = at_;
                std::string_view name = string("a tensor name");
                if (name == "__metadata__") {
                    if (has_metadata) fail_at(where, "duplicate key '__metadata__'");
                    has_metadata = true;
                    colon();
                    parse_metadata();
                } else {
                    Tensor tensor;
                    tensor.name_offset = names.size();
                    tensor.name_nbytes = name.size();
                    names += name;
                    if (!seen.insert(tensor.name_offset, tensor.name_nbytes))
                        fail_at(where, "duplicate key " + quoted(name_of(tensor)));
                    colon();
                    parse_tensor(tensor);
                    tensors.push_back(tensor);
                }
            } while (more('}', "the header"));
        }
        skip_space();
        if (at_ != end_) {
            if (*at_ == '\0') fail_here("the header is padded with NUL bytes; the format pads with spaces (0x20)");
            fail_here("text after the end of the JSON object");
        }
    }

    std::string_view name_of(const Tensor& tensor) const {
        return std::string_view(names).substr(tensor.name_offset, tensor.name_nbytes);
    }

private:
    const char* begin_;
    const char* at_;
    const char* end_;
    std::string scratch_;

    [[noreturn]] void fail_at(const char* where, const std::string& what) const {
        fail(what + " (at byte " + number(static_cast<uint64_t>(where - begin_)) + " of the JSON header of " +
             number(static_cast<uint64_t>(end_ - begin_)) + " bytes)");
    }
    [[noreturn]] void fail_here(const std::string& what) const { fail_at(at_, what); }

    void skip_space() {
        while (at_ != end_ && (*at_ == ' ' || *at_ == '\n' || *at_ == '\t' || *at_ == '\r')) ++at_;
    }
    bool try_take(char c) {
        skip_space();
        if (at_ == end_ || *at_ != c) return false;
        ++at_;
        return true;
    }
    void expect(char c, const char* what) {
        if (!try_take(c)) fail_here(what + found());
    }
    void expect(char c, const Tensor& tensor, const char* what) {
        if (!try_take(c)) fail_here("tensor " + quoted(name_of(tensor)) + ": " + what + found());
    }
    std::string found() const {
        if (at_ == end_) return ", found the end of the header";
        return ", found " + quoted(std::string_view(at_, 1 + trailing(at_)));
    }
    size_t trailing(const char* where) const {
        size_t n = 0;
        while (where + 1 + n < end_ && (static_cast<unsigned char>(where[1 + n]) & 0xC0) == 0x80) ++n;
        return n;
    }
    void colon() { expect(':', "expected ':' after a key"); }
    // After a member or an element: true if another follows, false at `close`.
    bool more(char close, const char* what) {
        skip_space();
        if (at_ != end_ && *at_ == ',') {
            ++at_;
            return true;
        }
        if (at_ != end_ && *at_ == close) {
            ++at_;
            return false;
        }
        fail_here(std::string("expected ',' or '") + close + "' in " + what + found());
    }

    // The decoded text: a piece of the input where there is no escape, else scratch_ (valid until the next call).
    std::string_view string(const char* what) {
        if (!try_take('"')) fail_here(std::string("expected a string, ") + what + found());
        const char* start = at_;
        skip_plain();
        if (at_ != end_ && *at_ == '"') return {start, static_cast<size_t>(at_++ - start)};
        scratch_.assign(start, at_);
        for (;;) {
            if (at_ == end_) fail_at(start - 1, "a string that does not end");
            if (*at_ == '"') {
                ++at_;
                return scratch_;
            }
            if (*at_ == '\\') {
                escape();
            } else {
                fail_here("a control character inside a string must be written as an escape" + found());
            }
            const char* run = at_;
            skip_plain();
            scratch_.append(run, at_);
        }
    }
    void skip_plain() {
        uint64_t word;
        // Eight at a time; the lowest marked byte is exact on a little-endian machine.
        while (end_ - at_ >= 8) {
            std::memcpy(&word, at_, 8);
            if (uint64_t stops = stops_in(word)) {
                at_ += std::countr_zero(stops) / 8;
                return;
            }
            at_ += 8;
        }
        while (at_ != end_ && !kStops.is[static_cast<unsigned char>(*at_)]) ++at_;
    }
    void escape() {
        const char* where = at_++;
        if (at_ == end_) fail_at(where, "an escape that does not end");
        switch (char c = *at_++) {
            case '"':
            case '\\':
            case '/': scratch_ += c; return;
            case 'b': scratch_ += '\b'; return;
            case 'f': scratch_ += '\f'; return;
            case 'n': scratch_ += '\n'; return;
            case 'r': scratch_ += '\r'; return;
            case 't': scratch_ += '\t'; return;
            case 'u': break;
            default: fail_at(where, "an escape that JSON does not have");
        }
        uint32_t code = hex4(where);
        if (code >= 0xDC00 && code <= 0xDFFF) fail_at(where, "a low surrogate without the high one before it");
        if (code >= 0xD800 && code <= 0xDBFF) {
            if (end_ - at_ < 6 || at_[0] != '\\' || at_[1] != 'u')
                fail_at(where, "a high surrogate without the low one after it");
            at_ += 2;
            uint32_t low = hex4(where);
            if (low < 0xDC00 || low > 0xDFFF) fail_at(where, "a high surrogate without the low one after it");
            code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
        }
        append_utf8(code);
    }
    uint32_t hex4(const char* where) {
        if (end_ - at_ < 4) fail_at(where, "a \\u escape needs four hexadecimal digits");
        uint32_t code = 0;
        for (int i = 0; i < 4; ++i) {
            char c = *at_++;
            uint32_t digit;
            if (c >= '0' && c <= '9') digit = static_cast<uint32_t>(c - '0');
            else if (c >= 'a' && c <= 'f') digit = static_cast<uint32_t>(c - 'a' + 10);
            else if (c >= 'A' && c <= 'F') digit = static_cast<uint32_t>(c - 'A' + 10);
            else fail_at(where, "a \\u escape needs four hexadecimal digits");
            code = code << 4 | digit;
        }
        return code;
    }
    void append_utf8(uint32_t code) {
        auto put = [this](uint32_t byte) { scratch_ += static_cast<char>(static_cast<unsigned char>(byte)); };
        if (code < 0x80) {
            put(code);
        } else if (code < 0x800) {
            put(0xC0 | code >> 6);
            put(0x80 | (code & 0x3F));
        } else if (code < 0x10000) {
            put(0xE0 | code >> 12);
            put(0x80 | (code >> 6 & 0x3F));
            put(0x80 | (code & 0x3F));
        } else {
            put(0xF0 | code >> 18);
            put(0x80 | (code >> 12 & 0x3F));
            put(0x80 | (code >> 6 & 0x3F));
            put(0x80 | (code & 0x3F));
        }
    }

    // A JSON number; returns false where it is no whole number of 0 to 2^64 - 1, with the reason.
    bool parse_number(uint64_t& value, const char*& reason) {
        reason = nullptr;
        bool negative = at_ != end_ && *at_ == '-';
        if (negative) {
            ++at_;
            reason = "is negative";
        }
        if (at_ == end_ || *at_ < '0' || *at_ > '9') fail_here("expected a digit" + found());
        value = 0;
        if (*at_ == '0') {
            ++at_;
            if (at_ != end_ && *at_ >= '0' && *at_ <= '9') fail_here("a number with a leading zero");
        } else {
            while (at_ != end_ && *at_ >= '0' && *at_ <= '9') {
                auto digit = static_cast<uint64_t>(*at_++ - '0');
                if (__builtin_mul_overflow(value, uint64_t{10}, &value) ||
                    __builtin_add_overflow(value, digit, &value)) {
                    if (!reason) reason = "does not fit 64 bits";
                }
            }
        }
        bool fraction = false;
        if (at_ != end_ && *at_ == '.') {
            fraction = true;
            ++at_;
            digits();
        }
        if (at_ != end_ && (*at_ == 'e' || *at_ == 'E')) {
            fraction = true;
            ++at_;
            if (at_ != end_ && (*at_ == '+' || *at_ == '-')) ++at_;
            digits();
        }
        if (fraction && !reason) reason = "is not written as a whole number";
        return reason == nullptr;
    }
    void digits() {
        if (at_ == end_ || *at_ < '0' || *at_ > '9') fail_here("expected a digit" + found());
        while (at_ != end_ && *at_ >= '0' && *at_ <= '9') ++at_;
    }
    uint64_t integer(const Tensor& tensor, const char* what) {
        skip_space();
        const char* where = at_;
        if (at_ == end_ || !(*at_ == '-' || (*at_ >= '0' && *at_ <= '9')))
            fail_here("tensor " + quoted(name_of(tensor)) + ": expected a whole number in " + what + found());
        uint64_t value;
        const char* reason;
        if (!parse_number(value, reason)) {
            std::string_view text(where, static_cast<size_t>(at_ - where));
            fail_at(where, "tensor " + quoted(name_of(tensor)) + ": " + std::string(text.substr(0, 40)) +
                               (text.size() > 40 ? "..." : "") + " in " + what + " " + reason +
                               "; expected a whole number from 0 to 18446744073709551615");
        }
        return value;
    }

    void parse_metadata() {
        skip_space();
        if (end_ - at_ >= 4 && std::memcmp(at_, "null", 4) == 0) {
            at_ += 4;
            return;
        }
        expect('{', "expected an object of strings as the value of '__metadata__'");
        if (try_take('}')) return;
        NameSet seen(metadata);
        do {
            skip_space();
            const char* where = at_;
            std::string_view key = string("a key of '__metadata__'");
            uint64_t offset = metadata.size();
            std::string shown = quoted(key);
            metadata += key;
            metadata_end.push_back(metadata.size());
            if (!seen.insert(offset, key.size())) fail_at(where, "duplicate key " + shown + " in '__metadata__'");
            colon();
            skip_space();
            if (at_ == end_ || *at_ != '"')
                fail_here("the value of " + shown + " in '__metadata__' must be a string" + found());
            metadata += string("a value of '__metadata__'");
            metadata_end.push_back(metadata.size());
        } while (more('}', "'__metadata__'"));
    }

    void parse_tensor(Tensor& tensor) {
        expect('{', tensor, "expected an object with dtype, shape, data_offsets");
        bool has_dtype = false, has_shape = false, has_offsets = false;
        std::string others;  // keys the format does not know, kept only to see duplicates
        NameSet seen(others);
        if (!try_take('}')) {
            do {
                skip_space();
                const char* where = at_;
                std::string_view key = string("a key of a tensor");
                bool* has = key == "dtype"          ? &has_dtype
                            : key == "shape"        ? &has_shape
                            : key == "data_offsets" ? &has_offsets
                                                    : nullptr;
                bool fresh;
                if (has) {
                    fresh = !*has;
                    *has = true;
                } else {
                    uint64_t offset = others.size();
                    others += key;
                    fresh = seen.insert(offset, key.size());
                }
                if (!fresh)
                    fail_at(where, "duplicate key " + quoted(key) + " in tensor " + quoted(name_of(tensor)));
                colon();
                if (has == &has_dtype) parse_dtype(tensor);
                else if (has == &has_shape) parse_shape(tensor);
                else if (has == &has_offsets) parse_offsets(tensor);
                else skip_value();
            } while (more('}', "a tensor"));
        }
        if (!has_dtype || !has_shape || !has_offsets) {
            const char* missing = !has_dtype ? "dtype" : !has_shape ? "shape" : "data_offsets";
            fail_here("tensor " + quoted(name_of(tensor)) + " has no " + missing);
        }
    }
    void parse_dtype(Tensor& tensor) {
        skip_space();
        const char* where = at_;
        if (at_ == end_ || *at_ != '"')
            fail_here("tensor " + quoted(name_of(tensor)) + ": dtype must be a string" + found());
        std::string_view text = string("a dtype");
        for (size_t i = 0; i < std::size(kDataTypes); ++i) {
            if (kDataTypes[i].name == text) {
                tensor.dtype = static_cast<uint8_t>(i);
                return;
            }
        }
        fail_at(where, "tensor " + quoted(name_of(tensor)) + ": unknown dtype " + quoted(text));
    }
    void parse_shape(Tensor& tensor) {
        expect('[', tensor, "expected an array of whole numbers as shape");
        tensor.shape_offset = shapes.size();
        if (try_take(']')) return;
        do {
            if (tensor.ndim == kMaxDimensions)
                fail_here("tensor " + quoted(name_of(tensor)) + ": more than " + number(kMaxDimensions) +
                          " dimensions, which no array can have");
            shapes.push_back(integer(tensor, "shape"));
            ++tensor.ndim;
        } while (more(']', "a shape"));
    }
    void parse_offsets(Tensor& tensor) {
        expect('[', tensor, "expected [begin, end] as data_offsets");
        tensor.begin = integer(tensor, "data_offsets");
        expect(',', tensor, "data_offsets needs two numbers");
        tensor.end = integer(tensor, "data_offsets");
        expect(']', tensor, "data_offsets needs exactly two numbers");
    }

    // Any JSON value, checked and dropped; no recursion, so that no depth of text can end the stack.
    void skip_value() {
        bool is_object[kMaxNesting];
        unsigned depth = 0;
        for (;;) {
            skip_space();
            if (at_ == end_) fail_here("expected a value, found the end of the header");
            char c = *at_;
            bool opened = false;
            if (c == '{' || c == '[') {
                if (depth == kMaxNesting) fail_here("more than " + number(kMaxNesting) + " levels of nesting");
                ++at_;
                is_object[depth++] = c == '{';
                if (try_take(c == '{' ? '}' : ']')) --depth;
                else opened = true;
            } else if (c == '"') {
                string("a value");
            } else if (c == '-' || (c >= '0' && c <= '9')) {
                uint64_t value;
                const char* reason;
                parse_number(value, reason);
            } else if (!literal("true") && !literal("false") && !literal("null")) {
                fail_here("expected a value" + found());
            }
            if (!opened) {
                while (depth && !more(is_object[depth - 1] ? '}' : ']', "a value")) --depth;
                if (!depth) return;
            }
            if (is_object[depth - 1]) {
                string("a key");
                colon();
            }
        }
    }
    bool literal(std::string_view word) {
        if (static_cast<size_t>(end_ - at_) < word.size() || std::memcmp(at_, word.data(), word.size()) != 0)
            return false;
        at_ += word.size();
        return true;
    }
};

std::string shape_text(const uint64_t* dims, unsigned ndim) {
    std::string out = "[";
    for (unsigned i = 0; i < ndim; ++i) out += (i ? ", " : "") + number(dims[i]);
    return out + "]";
}

std::string range_text(const Tensor& tensor) { return "[" + number(tensor.begin) + ", " + number(tensor.end) + "]"; }

// Bytes that dtype and shape need; every product is checked.
uint64_t bytes_needed(const Parser& parser, const Tensor& tensor) {
    const DataType& type = kDataTypes[tensor.dtype];
    const uint64_t* dims = parser.shapes.data() + tensor.shape_offset;
    bool empty = false;
    uint64_t bits = type.bits;
    for (unsigned i = 0; i < tensor.ndim; ++i) {
        // A zero dimension makes the tensor empty; the others must still fit, as an array's strides must.
        if (dims[i] == 0) {
            empty = true;
        } else if (__builtin_mul_overflow(bits, dims[i], &bits)) {
            fail("tensor " + quoted(parser.name_of(tensor)) + ": shape " + shape_text(dims, tensor.ndim) + " of " +
                 std::string(type.name) + " is more than " + number(kU64Max) + " bits; its data_offsets " +
                 range_text(tensor) + " hold " + number(tensor.end - tensor.begin) + " bytes");
        }
    }
    if (empty) return 0;
    if (bits % 8 != 0)
        fail("tensor " + quoted(parser.name_of(tensor)) + ": " + number(bits / type.bits) + " values of " +
             std::string(type.name) + " are " + number(bits) + " bits, which is no whole number of bytes (shape " +
             shape_text(dims, tensor.ndim) + ")");
    return bits / 8;
}

void validate(const Parser& parser, const std::vector<uint32_t>& order, uint64_t json_nbytes, uint64_t data_nbytes) {
    const Tensor* previous = nullptr;
    const Tensor* beyond = nullptr;
    uint64_t reached = 0;
    for (uint32_t index : order) {
        const Tensor& tensor = parser.tensors[index];
        std::string_view name = parser.name_of(tensor);
        if (tensor.begin > tensor.end)
            fail("tensor " + quoted(name) + ": data_offsets " + range_text(tensor) + " end before they begin");
        uint64_t needed = bytes_needed(parser, tensor);
        if (needed != tensor.end - tensor.begin)
            fail("tensor " + quoted(name) + ": shape " +
                 shape_text(parser.shapes.data() + tensor.shape_offset, tensor.ndim) + " of " +
                 std::string(kDataTypes[tensor.dtype].name) + " needs " + number(needed) + " bytes, its data_offsets " +
                 range_text(tensor) + " hold " + number(tensor.end - tensor.begin));
        if (tensor.begin < reached) {
            bool alias = previous->begin == tensor.begin && previous->end == tensor.end;
            fail("tensor " + quoted(name) + (alias ? " is an alias: it has the same data_offsets " : " overlaps: its data_offsets ") +
                 range_text(tensor) + (alias ? " as tensor " : " begin before the end of tensor ") +
                 quoted(parser.name_of(*previous)) + " at " + number(reached));
        }
        if (tensor.begin > reached)
            fail("a gap of " + number(tensor.begin - reached) + " bytes before tensor " + quoted(name) +
                 ": its data_offsets " + range_text(tensor) + " should begin at " + number(reached));
        reached = tensor.end;
        previous = &tensor;
        if (!beyond && tensor.end > data_nbytes) beyond = &tensor;
    }
    uint64_t head = 8 + json_nbytes;
    if (beyond) {
        uint64_t expected;
        std::string expected_text =
            __builtin_add_overflow(reached, head, &expected) ? "more than " + number(kU64Max) : number(expected);
        throw Failure{XDS_SAFETENSORS_TRUNCATED,
                      "the file is truncated: expected " + expected_text + " bytes, has " + number(head + data_nbytes) +
                          "; the first tensor that is not whole is " + quoted(parser.name_of(*beyond)) +
                          " with data_offsets " + range_text(*beyond) + " in a data section of " +
                          number(data_nbytes) + " bytes"};
    }
    if (reached < data_nbytes)
        fail(number(data_nbytes - reached) + " trailing bytes after the last tensor: expected a file of " +
             number(head + reached) + " bytes, it has " + number(head + data_nbytes));
}

std::vector<uint32_t> file_order(const Parser& parser) {
    if (parser.tensors.size() > UINT32_MAX) fail("more than 4294967295 tensors");
    std::vector<uint32_t> order(parser.tensors.size());
    std::iota(order.begin(), order.end(), 0u);
    auto before = [&](uint32_t left, uint32_t right) {
        const Tensor &a = parser.tensors[left], &b = parser.tensors[right];
        if (a.begin != b.begin) return a.begin < b.begin;
        if (a.end != b.end) return a.end < b.end;
        return parser.name_of(a) < parser.name_of(b);
    };
    if (!std::is_sorted(order.begin(), order.end(), before)) std::sort(order.begin(), order.end(), before);
    return order;
}

struct Owner {
    std::vector<uint64_t> begin, end, shape_offset, name_offset, name_nbytes, shapes, metadata_end;
    std::vector<uint8_t> dtype, ndim;
    std::string names, metadata, error;
};

void fill(Owner& owner, Parser& parser, const std::vector<uint32_t>& order) {
    size_t count = order.size();
    for (auto* column : {&owner.begin, &owner.end, &owner.shape_offset, &owner.name_offset, &owner.name_nbytes})
        column->resize(count);
    owner.dtype.resize(count);
    owner.ndim.resize(count);
    owner.names.reserve(parser.names.size() + count);
    for (size_t i = 0; i < count; ++i) {
        const Tensor& tensor = parser.tensors[order[i]];
        owner.begin[i] = tensor.begin;
        owner.end[i] = tensor.end;
        owner.shape_offset[i] = tensor.shape_offset;
        owner.dtype[i] = tensor.dtype;
        owner.ndim[i] = tensor.ndim;
        if (i) owner.names += '\n';
        owner.name_offset[i] = owner.names.size();
        owner.name_nbytes[i] = tensor.name_nbytes;
        owner.names += parser.name_of(tensor);
    }
    owner.shapes = std::move(parser.shapes);
    owner.metadata = std::move(parser.metadata);
    owner.metadata_end = std::move(parser.metadata_end);
}

void publish(const Owner& owner, xds_safetensors_header* out) {
    out->count = owner.begin.size();
    out->begin = owner.begin.data();
    out->end = owner.end.data();
    out->shape_offset = owner.shape_offset.data();
    out->name_offset = owner.name_offset.data();
    out->name_nbytes = owner.name_nbytes.data();
    out->dtype = owner.dtype.data();
    out->ndim = owner.ndim.data();
    out->shapes = owner.shapes.data();
    out->shapes_count = owner.shapes.size();
    out->names = owner.names.data();
    out->names_nbytes = owner.names.size();
    out->metadata = owner.metadata.data();
    out->metadata_end = owner.metadata_end.data();
    out->metadata_pairs = owner.metadata_end.size() / 2;
}

}  // namespace

int xds_safetensors_parse(const char* json, uint64_t json_nbytes, uint64_t data_nbytes, xds_safetensors_header* out) {
    *out = {};
    out->error = "not enough memory to read the header";
    std::unique_ptr<Owner> owner(new (std::nothrow) Owner);
    if (!owner) return XDS_SAFETENSORS_NO_MEMORY;
    int status = XDS_SAFETENSORS_OK;
    try {
        std::string_view text(json, json_nbytes);
        size_t bad = utf8_error(text);
        if (bad != text.size())
            fail("the header is not UTF-8 (at byte " + number(bad) + " of the JSON header of " + number(json_nbytes) +
                 " bytes)");
        Parser parser(text);
        parser.parse();
        std::vector<uint32_t> order = file_order(parser);
        validate(parser, order, json_nbytes, data_nbytes);
        fill(*owner, parser, order);
        publish(*owner, out);
    } catch (Failure& failure) {
        status = failure.status;
        owner->error = std::move(failure.message);
    } catch (const std::bad_alloc&) {
        return XDS_SAFETENSORS_NO_MEMORY;
    }
    out->error = owner->error.c_str();
    out->owner = owner.release();
    return status;
}

void xds_safetensors_free(xds_safetensors_header* header) {
    delete static_cast<Owner*>(header->owner);
    *header = {};
}
