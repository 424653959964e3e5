// A process that was forked off has none of its parent's threads, and perhaps a mutex that one of them held: whoever has
// threads asks first whether it is at home.
#pragma once

struct spac_home_process {
    spac_home_process();

    bool is_this() const;

    static constexpr const char * ELSEWHERE = "the engine was attached by the process that this one was forked from, and its threads exist only there: fork before the "
                                              "model is loaded, or load it here again";

  private:
    const int n_forks; // before
};
