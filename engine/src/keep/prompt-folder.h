// A folder of kept prompts, which several servers may share: whoever writes or throws away holds the folder's lock; readers need none, as
// a file appears whole and never changes.
#pragma once

#include "kept-file.h"

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

struct spac_prompt_folder {
    spac_prompt_folder(const std::string & path, const std::string & key, size_t max_bytes); // throws spac_error
    ~spac_prompt_folder();
    spac_prompt_folder(const spac_prompt_folder &)             = delete;
    spac_prompt_folder & operator=(const spac_prompt_folder &) = delete;

    const size_t max_bytes; // of all files, also those with other keys

    // what begins with a kept prompt takes its place; what is thrown away is that which was used longest ago
    void save(spac_kept_head && head, const spac_parts & parts);

    // the prompt that shares the most with these tokens, more than n_min and a quarter of its own, and has n_max at most; it is
    // used now. No tokens: there is none
    std::vector<int32_t> load(const int32_t * tokens, size_t n_tokens, size_t n_min, size_t n_max, spac_parts & parts);

  private:
    struct entry {
        std::string name;
        size_t      n_bytes;
        int64_t     used_ns;
    };
    using heads_by_name = std::map<std::string, std::shared_ptr<const spac_kept_head>>;

    std::vector<entry> list(const char * ending) const; // used longest ago first
    heads_by_name      heads();                         // of this key
    bool               has(const spac_kept_head & head);
    void               make_room(size_t n_bytes, const std::vector<std::string> & first);
    void               remove(const std::string & name);
    void               write(const spac_kept_head & head, const spac_parts & parts);

    const std::string path, key;
    int               fd = -1; // the folder: what is locked

    std::mutex    mutex; // guards known
    heads_by_name known;
};
