// A chat template, as llama-server applies it.
#include "draft/chat-template.h"

#include "chat.h"
#include "log.h"

struct library_chat_template : spac_chat_template {
    library_chat_template(const char * source, const char * bos, const char * eos) :
        templates(common_chat_templates_init(nullptr, source, bos, eos)),
        can_think(common_chat_templates_support_enable_thinking(templates.get())) {}

    std::string apply(const char * messages) const override {
        common_chat_templates_inputs inputs;
        inputs.messages = common_chat_msgs_parse_oaicompat(common_json::parse(messages));
        // as llama-server has them by default; what was thought stays in the text, and so in the context
        inputs.reasoning_format     = COMMON_REASONING_FORMAT_DEEPSEEK;
        inputs.enable_thinking      = can_think;
        inputs.chat_template_kwargs = {
            { "preserve_reasoning", "true" }
        };
        return common_chat_templates_apply(templates.get(), inputs).prompt;
    }

  private:
    common_chat_templates_ptr templates;
    bool                      can_think;
};

extern "C" __attribute__((visibility("default"))) spac_chat_template * spac_chat_template_make(const char * source, const char * bos, const char * eos) {
    common_log_set_verbosity_thold(LOG_LEVEL_ERROR - 1); // errors come back as text
    return new library_chat_template(source, bos, eos);
}
