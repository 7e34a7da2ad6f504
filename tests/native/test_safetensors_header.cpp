// The native safetensors header reader, alone: exact results, every refusal, and seeded damage that must never crash.
// Built with -DXDS_BUILD_TESTS=ON; run it under the sanitizers too.
#include "safetensors_header.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

namespace {

#define CHECK(condition, ...)                                                        \
    do {                                                                             \
        if (!(condition)) {                                                          \
            std::fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition);     \
            std::fprintf(stderr, __VA_ARGS__);                                       \
            std::fputc('\n', stderr);                                                \
            std::abort();                                                            \
        }                                                                            \
    } while (0)

struct Result {
    int status;
    xds_safetensors_header header;
    explicit Result(std::string_view json, uint64_t data_nbytes) {
        // An exact heap copy lets the address sanitizer see a read of one byte too many.
        std::unique_ptr<char[]> copy(new char[json.size()]);
        std::memcpy(copy.get(), json.data(), json.size());
        status = xds_safetensors_parse(copy.get(), json.size(), data_nbytes, &header);
    }
    ~Result() { xds_safetensors_free(&header); }
    Result(const Result&) = delete;
    std::string name(uint64_t i) const { return {header.names + header.name_offset[i], header.name_nbytes[i]}; }
};

void good() {
    Result r(" {\"__metadata__\": {\"k\": \"v\\n\"}, \"b\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[2,26]},\r\n"
             "\"a\\u00e9\\ud83d\\ude00\":{\"x\":[{\"y\":[1.5e3,null]},true],\"data_offsets\":[0,2],\"shape\":[],\"dtype\":\"BF16\"}}  ",
             26);
    CHECK(r.status == XDS_SAFETENSORS_OK, "%s", r.header.error);
    CHECK(r.header.count == 2, "count");
    CHECK(r.name(0) == "a\xC3\xA9\xF0\x9F\x98\x80", "%s", r.name(0).c_str());
    CHECK(r.name(1) == "b", "%s", r.name(1).c_str());
    CHECK(r.header.begin[1] == 2 && r.header.end[1] == 26, "range");
    CHECK(r.header.ndim[0] == 0 && r.header.ndim[1] == 2, "ndim");
    CHECK(r.header.shapes[r.header.shape_offset[1]] == 2 && r.header.shapes[r.header.shape_offset[1] + 1] == 3, "shape");
    CHECK(r.header.metadata_pairs == 1 && r.header.metadata_end[0] == 1 && r.header.metadata_end[1] == 3, "metadata");
    CHECK(std::memcmp(r.header.metadata, "kv\n", 3) == 0, "metadata text");
    CHECK(std::strlen(r.header.error) == 0, "no error text");
    Result empty("{}", 0);
    CHECK(empty.status == XDS_SAFETENSORS_OK && empty.header.count == 0, "empty");
}

void refused() {
    struct Case {
        const char* json;
        uint64_t data;
        int status;
        const char* text;
    };
    const Case cases[] = {
        {"", 0, XDS_SAFETENSORS_INVALID, "empty"},
        {"[]", 0, XDS_SAFETENSORS_INVALID, "expected '{'"},
        {"{", 0, XDS_SAFETENSORS_INVALID, "tensor name"},
        {"{}x", 0, XDS_SAFETENSORS_INVALID, "text after"},
        {"{\"a\\ud800\":1}", 0, XDS_SAFETENSORS_INVALID, "high surrogate"},
        {"{\"a\\udc00\":1}", 0, XDS_SAFETENSORS_INVALID, "low surrogate"},
        {"{\"\xFF\":1}", 0, XDS_SAFETENSORS_INVALID, "not UTF-8 (at byte 2"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},\"a\":{}}", 1, XDS_SAFETENSORS_INVALID, "duplicate key 'a'"},
        {"{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\"}}", 1, XDS_SAFETENSORS_INVALID, "duplicate key 'dtype'"},
        {"{\"__metadata__\":{\"k\":\"1\",\"k\":\"1\"}}", 0, XDS_SAFETENSORS_INVALID, "duplicate key 'k'"},
        {"{\"__metadata__\":{\"k\":1}}", 0, XDS_SAFETENSORS_INVALID, "must be a string"},
        {"{\"a\":{\"dtype\":\"F4\",\"shape\":[3],\"data_offsets\":[0,2]}}", 2, XDS_SAFETENSORS_INVALID, "12 bits"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", 0, XDS_SAFETENSORS_INVALID, "bits"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,8]}}", 7, XDS_SAFETENSORS_TRUNCATED, "expected 69 bytes, has 68"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,8]}}", 9, XDS_SAFETENSORS_INVALID, "1 trailing bytes"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[18446744073709551616],\"data_offsets\":[0,8]}}", 8, XDS_SAFETENSORS_INVALID, "does not fit 64 bits"},
    };
    for (const Case& c : cases) {
        Result r(c.json, c.data);
        CHECK(r.status == c.status, "%s: status %d: %s", c.json, r.status, r.header.error);
        CHECK(std::strstr(r.header.error, c.text), "%s: %s", c.json, r.header.error);
        CHECK(r.header.count == 0, "%s: columns on an error", c.json);
    }
    std::string deep = "{\"a\":{\"x\":" + std::string(1000000, '[');
    Result r(deep, 0);
    CHECK(r.status == XDS_SAFETENSORS_INVALID && std::strstr(r.header.error, "nesting"), "%s", r.header.error);
}

std::string make_header(std::mt19937_64& random, uint64_t& data_nbytes) {
    static const struct { const char* name; unsigned bytes; } kTypes[] = {{"U8", 1}, {"BF16", 2}, {"F32", 4}, {"C64", 8}};
    std::string json = "{\"__metadata__\":{\"format\":\"pt\",\"\\u00e9\":\"\\ud83d\\ude00\"}";
    data_nbytes = 0;
    for (uint64_t i = 0, count = random() % 12; i < count; ++i) {
        const auto& type = kTypes[random() % 4];
        uint64_t rows = random() % 5, columns = random() % 7, nbytes = rows * columns * type.bytes;
        json += ",\"layer." + std::to_string(i) + ".weight\":{\"dtype\":\"" + type.name + "\",\"shape\":[" +
                std::to_string(rows) + "," + std::to_string(columns) + "],\"data_offsets\":[" +
                std::to_string(data_nbytes) + "," + std::to_string(data_nbytes + nbytes) + "]}";
        data_nbytes += nbytes;
    }
    return json + "}" + std::string(random() % 9, ' ');
}

// Whatever the bytes are: no crash, and what is accepted is consistent.
void damaged(unsigned rounds) {
    std::mt19937_64 random(20240229);
    static const char kLikely[] = "{}[]\",:\\0123456789-+eE.u \0\xff\xed\xa0";
    unsigned accepted = 0;
    for (unsigned round = 0; round < rounds; ++round) {
        uint64_t data_nbytes;
        std::string json = make_header(random, data_nbytes);
        if (round % 5 == 0) {
            Result whole(json, data_nbytes);
            CHECK(whole.status == XDS_SAFETENSORS_OK, "%s: %s", json.c_str(), whole.header.error);
        }
        for (uint64_t i = 0, edits = 1 + random() % 4; i < edits && !json.empty(); ++i) {
            size_t at = random() % json.size();
            switch (random() % 5) {
                case 0: json[at] = static_cast<char>(random()); break;
                case 1: json[at] = kLikely[random() % (sizeof kLikely - 1)]; break;
                case 2: json.resize(at); break;
                case 3: json.insert(at, 1, kLikely[random() % (sizeof kLikely - 1)]); break;
                case 4: json.erase(at, 1 + random() % 8); break;
            }
        }
        Result r(json, data_nbytes);
        CHECK((r.status == XDS_SAFETENSORS_OK) == (std::strlen(r.header.error) == 0), "%s", r.header.error);
        if (r.status != XDS_SAFETENSORS_OK) continue;
        ++accepted;
        uint64_t reached = 0;
        for (uint64_t i = 0; i < r.header.count; ++i) {
            CHECK(r.header.begin[i] == reached && r.header.end[i] >= reached, "layout of an accepted header");
            CHECK(r.header.shape_offset[i] + r.header.ndim[i] <= r.header.shapes_count, "shape range");
            CHECK(r.header.name_offset[i] + r.header.name_nbytes[i] <= r.header.names_nbytes, "name range");
            reached = r.header.end[i];
        }
        CHECK(reached == data_nbytes, "an accepted header covers the data");
    }
    CHECK(accepted > 0, "no damaged header was accepted: the loop no longer tests what it should");
    std::printf("%u damaged headers, %u of them still valid\n", rounds, accepted);
}

}  // namespace

int main(int argc, char** argv) {
    good();
    refused();
    damaged(argc > 1 ? static_cast<unsigned>(std::strtoul(argv[1], nullptr, 10)) : 20000);
    std::puts("ok");
    return 0;
}
