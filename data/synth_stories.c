// Generates children's stories and writes them as shards of byte tokens, so that a machine without network can train:
//   synth_stories --out PREFIX --bytes N --seed S   makes PREFIX_train.bin (N bytes of text),
//   PREFIX_val.bin (N/20 bytes of text) and PREFIX.tokenizer; the last story may exceed these numbers
// Token ids 0 ... 255 are bytes, 256 stands before each story. The same options give the same files on every machine.
//
// A story follows a plot: a list of beats. Each beat lists alternatives, separated by '|', of one or more sentences,
// and one alternative is taken. A sentence may hold these slots:
//   {list}            a word of that list, picked anew each time
//   {list1} {list2}   a word of that list, picked at first use and kept for the whole story; 1 and 2 differ
//   {hero} {friend}   two different names
//   {he} {his} {him}  the hero's pronouns; {fhe}: "he" or "she" for the friend
//   {child} {child2}  "girl" or "boy" for the hero, and for the friend
//   {a}               "a" or "an", as the next letter asks
// The first letter of a beat becomes a capital.
#include <getopt.h>

#include "../llmc/data/dataloader.h"
#include "../llmc/base/rng.h"
#include "../llmc/data/tokenizer.h"
#include "../llmc/base/utils.h"

#define BYTE_VALUES 256
#define SEPARATOR 256
#define MAX_ALTERNATIVES 64
#define MAX_REMEMBERED 32
#define WORD_CAPACITY 32
#define SENTENCE_CAPACITY 512
#define STORY_CAPACITY 8192
#define ARTICLE '@'  // stands for "a" or "an" until the next word is known

typedef struct {
    const char *name;
    const char *words;  // separated by '|'
} WordList;

static const WordList WORD_LISTS[] = {
    {"girl", "Lily|Mia|Anna|Sue|Lucy|Emma|Rosa|Nina|Clara|Ella|Molly|Daisy|Amy|Zoe|Kate|Ruby|Jane|Sara|Ivy|Tina"},
    {"boy", "Tom|Ben|Max|Sam|Jack|Tim|Leo|Dan|Finn|Oscar|Nick|Joe|Adam|Luke|Peter|Bob|Henry|Toby|Carl|Mark"},
    {"kind", "little|small|young|happy|kind|brave|curious|clever|quiet|cheerful|gentle|friendly"},
    {"animal",
     "dog|cat|rabbit|bird|duck|frog|mouse|squirrel|fox|turtle|pony|owl|bear|goat|lamb|hen|hedgehog|kitten|puppy|deer"},
    {"toy", "ball|kite|doll|drum|truck|boat|train|puzzle|teddy "
            "bear|hat|scarf|book|bell|basket|balloon|lantern|whistle|umbrella|necklace|robot|wagon|"
            "blanket|mirror|crayon"},
    {"color", "red|blue|green|yellow|purple|orange|pink|white|brown|golden|silver|black"},
    {"size", "big|tiny|long|round|shiny|soft|old|new|pretty|strange|heavy|warm"},
    {"place", "park|garden|forest|beach|farm|river|lake|meadow|yard|playground|hill|market|school|library|barn|village|"
              "zoo|pond"},
    {"spot", "tree|bench|bush|rock|fence|bridge|table|bed|chair|box|gate|door"},
    {"food", "apple|cake|cookie|sandwich|banana|orange|pie|carrot|pancake|strawberry|muffin|pear|egg|plum|peach"},
    {"weather", "sunny|windy|warm|cold|cloudy|bright|rainy|snowy|quiet|hot"},
    {"family", "mom|dad|grandma|grandpa|sister|brother|aunt|uncle"},
    {"glad", "happy|glad|proud|excited|cheerful|thankful"},
    {"sad", "sad|upset|worried|lonely|afraid|unhappy|tired"},
    {"played", "played|jumped|danced|ran|laughed|sang|skipped|clapped"},
    {"play", "play|jump|dance|run|sing|skip|swim|climb|draw|read|paint|explore"},
    {"went", "went|walked|ran|hurried|skipped|marched"},
    {"slowly", "slowly|quickly|carefully|quietly|gently|bravely|softly|happily"},
    {"time", "day|morning|afternoon|evening"},
    {"sky", "sun|moon|sky|clouds|stars"},
    {"lesson", "share|be kind|tell the truth|be brave|help others|listen|try again|say sorry|be patient|ask for "
               "help|work together"},
    {"job", "clean the room|wash the dishes|water the flowers|feed the hens|bake bread|pick berries|fix the "
            "fence|sweep the floor|plant seeds|carry the wood"},
    {"scare", "storm|thunder|dark|shadow|loud noise|wind"},
    {"build", "sand castle|snowman|tree house|paper boat|bird house|tower of blocks|little bridge|mud pie"},
};
#define NUM_LISTS ((int)(sizeof WORD_LISTS / sizeof *WORD_LISTS))

#define OPENING                                                                                                      \
    "once upon a time, there was {a} {kind} {child} named {hero}.|there was once {a} {kind} {child} called {hero}.|" \
    "one morning, {a} {kind} {child} named {hero} woke up early.|{hero} was {a} {kind} {child} who lived near {a} "  \
    "{place}."
#define MORAL                                                                                                       \
    "from that day on, {hero} always remembered to {lesson1}.|{hero} learned that it is good to {lesson1}.|and so " \
    "{hero} learned to {lesson1}."
#define GOOD_END                                                                                                   \
    "{hero} went home with a big smile.|they all lived happily ever after.|that night, {hero} slept well and had " \
    "sweet dreams.|"                                                                                               \
    "it was the best day ever.|{hero} gave {his} {family1} a big hug."

static const char *const PLOT_LOST_TOY[] = {
    OPENING,
    "{he} had {a} {color1} {toy1} and took it everywhere.|{his} {family1} gave {him} {a} {color1} {toy1}.|{hero} loved "
    "{his} {color1} {toy1} very much.",
    "one {weather} day, {hero} {went} to the {place1} with the {toy1}.|on {a} {weather} {time}, {he} took the {toy1} "
    "to the {place1}.",
    "but then the {toy1} was gone!|soon {he} saw that the {toy1} was lost.|when {he} looked for the {toy1}, it was not "
    "there.",
    "{hero} was very {sad} and began to cry.|{he} looked under the {spot}, but it was not there.|\"Where is my "
    "{toy1}?\" asked {hero}.",
    "{a} {kind} {child2} named {friend} saw that {hero} was {sad}.|{hero} met {his} friend {friend}.|then {friend} "
    "came to the {place1}.",
    "\"I will help you,\" said {friend}.|\"Do not cry,\" said {friend}. \"We can look together.\"",
    "they looked behind the {spot1}, and there was the {color1} {toy1}!|{friend} found the {toy1} under the {spot1}.|"
    "{fhe} looked behind the {spot1} and saw the {toy1}.",
    "{hero} was so {glad} and said, \"Thank you, {friend}!\"|\"Thank you!\" said {hero}, and they {played} together.",
    GOOD_END,
    NULL};

static const char *const PLOT_ANIMAL_IN_NEED[] = {
    OPENING,
    "one {weather} {time}, {he} {went} to the {place1}.|{he} liked to {play} at the {place1}.",
    "there {he} saw {a} {size} {animal1}.|near the {spot}, {he} met {a} {color} {animal1}.|{hero} heard {a} {size} "
    "{animal1} cry.",
    "the {animal1} was {sad} and could not get home.|the {animal1} was stuck under {a} {spot1}.|the {animal1} was "
    "hungry and {sad}.",
    "\"Can you help me?\" asked the {animal1}.|\"Hello, little {animal1},\" said {hero}. \"What is wrong?\"",
    "{hero} wanted to help, so {he} {slowly} gave the {animal1} {a} {food1}.|{he} {slowly} took the {animal1} in {his} "
    "arms.|"
    "{hero} gave it {a} {food1} and some water.",
    "the {animal1} was {glad} and said, \"Thank you, {hero}!\"|soon the {animal1} was {glad} again.",
    "{hero} and the {animal1} {played} until the sun went down.|then they {played} at the {place1} all day.",
    MORAL,
    GOOD_END,
    NULL};

static const char *const PLOT_SHARING[] = {
    OPENING,
    "{he} had a friend named {friend}.|{his} best friend was {friend}.",
    "one day, they {went} to the {place1} to {play}.|they liked to {play} at the {place1}.",
    "{hero} had {a} {size} {toy1}, and {friend} wanted to play with it.|{friend} asked, \"Can I play with your "
    "{toy1}?\"",
    "\"No, it is mine!\" said {hero}.|but {hero} did not want to share the {toy1}.",
    "{friend} was {sad} and went away.|{friend} sat by the {spot} and was {sad}.",
    "then {hero} felt {sad} too, because {he} was all alone.|{hero} saw that {friend} was {sad}, and {he} felt sorry.",
    "\"I am sorry,\" said {hero}. \"We can share the {toy1}.\"|{he} gave the {toy1} to {friend} and said, \"Let us "
    "play together.\"",
    "{friend} was {glad}, and they {played} with the {toy1} all day.|they {played} and {played} until it was time to "
    "go home.",
    "{hero} learned that it is good to share.|{hero} was {glad} that {he} had shared.|they were the best of friends.",
    NULL};

static const char *const PLOT_HELPING_AT_HOME[] = {
    OPENING,
    "one {weather} {time}, {his} {family1} had to {job1}.|\"Can you help me {job1}?\" asked {his} {family1}.",
    "\"Yes, I can help!\" said {hero}.|{hero} wanted to {play}, but {he} said yes.",
    "they worked together and sang a song.|they worked {slowly} until it was done.|it was hard work, but {hero} did "
    "not stop.",
    "\"You are a big help,\" said {his} {family1}.|{his} {family1} was {glad} and said, \"Well done!\"",
    "then they ate {a} {food1} and {a} {food2}.|{his} {family1} gave {him} {a} {food1}.",
    "{hero} was {glad} and wanted to help again.|{hero} felt {glad} all day.",
    MORAL,
    GOOD_END,
    NULL};

static const char *const PLOT_BEING_AFRAID[] = {
    OPENING,
    "{he} was afraid of the {scare1}.|there was one thing {he} did not like: the {scare1}.",
    "one {time}, {hero} was alone at the {place1}.|one night, {hero} could not sleep.",
    "then came the {scare1}, and {hero} was very {sad}.|the {scare1} made {him} feel {sad}.",
    "{his} {family1} heard {him} cry and came to {him}.|{he} called {his} {family1}, who came {slowly}.",
    "\"Do not be afraid,\" said {his} {family1}. \"I am here.\"|\"It is only the {scare1},\" said {his} {family1}. "
    "\"It can not hurt you.\"",
    "they looked at the {sky} together.|{his} {family1} gave {him} {a} {color} {toy1} to hold.|{his} {family1} sang a "
    "soft song.",
    "soon {hero} was not afraid any more.|then {hero} felt safe and warm.",
    "{hero} learned to be brave.|now {hero} was brave.",
    GOOD_END,
    NULL};

static const char *const PLOT_BUILDING[] = {
    OPENING,
    "one {weather} day, {he} {went} to the {place1} with {friend}.|{hero} and {friend} were friends, and they liked to "
    "{play}.",
    "\"Let us make {a} {build1}!\" said {hero}.|they wanted to make {a} {build1}.",
    "they worked {slowly} for a long time.|{hero} and {friend} worked all day.|{friend} found {a} {size} {color} "
    "{toy1} for it.",
    "but {a} {size} {animal1} came and broke the {build1}.|then the wind came, and the {build1} fell down.",
    "{friend} was {sad}, but {hero} said, \"We can try again.\"|\"Oh no!\" said {friend}. \"Our {build1} is gone.\"",
    "so they made a new {build1}, and it was even better.|they tried again, and soon it was done.",
    "they were {glad} and {played} around the {build1}.|\"It is the best {build1} of all!\" said {friend}.",
    "they learned to try again.|they learned that it is good to work together.",
    GOOD_END,
    NULL};

static const char *const PLOT_PICNIC[] = {
    OPENING,
    "it was {a} {weather} {time}, and {hero} was {glad}.|{he} liked to eat {a} {food1} every day.",
    "{his} {family1} said, \"Let us go to the {place1}.\"|{hero} and {his} {family1} {went} to the {place1}.",
    "they took {a} {food1}, {a} {food2} and {a} {color} {toy1}.|in the basket they had {a} {food1} and {a} {food2}.",
    "at the {place1}, they sat under {a} {spot}.|they sat by the {spot} and looked at the {sky}.",
    "{a} {size} {animal1} came and looked at the {food1}.|then {a} {color} {animal1} came to say hello.",
    "\"Are you hungry?\" asked {hero}.|\"Would you like some?\" asked {hero}.",
    "{hero} gave some of the {food1} to the {animal1}.|the {animal1} ate the {food2} and was {glad}.",
    "the {animal1} {played} with {hero} all day.|then they {played} under the {sky}.",
    MORAL,
    GOOD_END,
    NULL};

static const char *const *const PLOTS[] = {PLOT_LOST_TOY,     PLOT_ANIMAL_IN_NEED, PLOT_SHARING, PLOT_HELPING_AT_HOME,
                                           PLOT_BEING_AFRAID, PLOT_BUILDING,       PLOT_PICNIC};
#define NUM_PLOTS ((int)(sizeof PLOTS / sizeof *PLOTS))

typedef struct {
    char slot[WORD_CAPACITY], word[WORD_CAPACITY];
} Remembered;

// The story that is being written.
typedef struct {
    uint64_t key, draws;  // random numbers: draw i of this story is rng_u64(key, i)
    bool hero_is_girl, friend_is_girl;
    Remembered remembered[MAX_REMEMBERED];
    int num_remembered;
    char text[STORY_CAPACITY];
    size_t length;
} Story;

static int story_pick(Story *s, int n) { return (int)(rng_u64(s->key, s->draws++) % (uint64_t)n); }

// Copies one alternative of `text`, picked at random. '|' separates the alternatives.
static void story_pick_alternative(Story *s, const char *text, char *out, size_t capacity) {
    const char *starts[MAX_ALTERNATIVES];
    int n = 0;
    starts[n++] = text;
    for (const char *bar = strchr(text, '|'); bar; bar = strchr(bar + 1, '|')) {
        if (n == MAX_ALTERNATIVES) die("more than %d alternatives in \"%s\"", MAX_ALTERNATIVES, text);
        starts[n++] = bar + 1;
    }
    const char *start = starts[story_pick(s, n)];
    format_checked(out, capacity, "%.*s", (int)strcspn(start, "|"), start);
}

static const char *find_list(const char *name) {
    for (int i = 0; i < NUM_LISTS; i++)
        if (strcmp(WORD_LISTS[i].name, name) == 0) return WORD_LISTS[i].words;
    die("no word list \"%s\"", name);
}

static const char *find_remembered(const Story *s, const char *slot) {
    for (int i = 0; i < s->num_remembered; i++)
        if (strcmp(s->remembered[i].slot, slot) == 0) return s->remembered[i].word;
    return NULL;
}

// Returns the story's word for `slot`. Picks it from `list` at first use, other than the word of slot `other`.
static const char *story_remember(Story *s, const char *slot, const char *other, const char *list) {
    const char *word = find_remembered(s, slot), *taken = find_remembered(s, other);
    if (word) return word;
    if (s->num_remembered == MAX_REMEMBERED) die("more than %d remembered words in a story", MAX_REMEMBERED);
    Remembered *r = &s->remembered[s->num_remembered++];
    format_checked(r->slot, sizeof r->slot, "%s", slot);
    do story_pick_alternative(s, list, r->word, sizeof r->word);
    while (taken && strcmp(r->word, taken) == 0);
    return r->word;
}

// Returns a word for one of the two characters: a name, a pronoun, "girl" or "boy". NULL if `slot` is something else.
static const char *character_word(Story *s, const char *slot) {
    bool hero_girl = s->hero_is_girl, friend_girl = s->friend_is_girl;
    if (strcmp(slot, "hero") == 0) return story_remember(s, "hero", "friend", find_list(hero_girl ? "girl" : "boy"));
    if (strcmp(slot, "friend") == 0)
        return story_remember(s, "friend", "hero", find_list(friend_girl ? "girl" : "boy"));
    if (strcmp(slot, "child") == 0) return hero_girl ? "girl" : "boy";
    if (strcmp(slot, "child2") == 0) return friend_girl ? "girl" : "boy";
    if (strcmp(slot, "he") == 0) return hero_girl ? "she" : "he";
    if (strcmp(slot, "his") == 0) return hero_girl ? "her" : "his";
    if (strcmp(slot, "him") == 0) return hero_girl ? "her" : "him";
    if (strcmp(slot, "fhe") == 0) return friend_girl ? "she" : "he";
    return NULL;
}

// Writes the word for a slot; `out` has room for WORD_CAPACITY bytes.
static void fill_slot(Story *s, const char *slot, char *out) {
    char list[WORD_CAPACITY], other[WORD_CAPACITY];
    size_t last = strlen(slot) - 1;
    const char *word = strcmp(slot, "a") == 0 ? "@" : character_word(s, slot);
    if (!word && (slot[last] == '1' || slot[last] == '2')) {
        format_checked(list, sizeof list, "%.*s", (int)last, slot);
        format_checked(other, sizeof other, "%.*s%c", (int)last, slot, slot[last] == '1' ? '2' : '1');
        word = story_remember(s, slot, other, find_list(list));
    }
    if (word) format_checked(out, WORD_CAPACITY, "%s", word);
    else story_pick_alternative(s, find_list(slot), out, WORD_CAPACITY);
}

static void story_put(Story *s, char c) {
    if (s->length == STORY_CAPACITY) die("a story is longer than %d bytes", STORY_CAPACITY);
    s->text[s->length++] = c;
}

// Copies a sentence to `out` with its slots filled. The slot {a} becomes ARTICLE, which story_append_beat replaces.
static void fill_sentence(Story *s, const char *sentence, char *out, size_t capacity) {
    size_t n = 0;
    for (const char *p = sentence; *p;) {
        char slot[WORD_CAPACITY], word[WORD_CAPACITY];
        size_t plain = strcspn(p, "{");
        format_checked(out + n, capacity - n, "%.*s", (int)plain, p);
        n += plain;
        p += plain;
        if (!*p) break;
        size_t end = strcspn(p, "}");
        format_checked(slot, sizeof slot, "%.*s", (int)end - 1, p + 1);
        p += end + 1;
        fill_slot(s, slot, word);
        format_checked(out + n, capacity - n, "%s", word);
        n += strlen(word);
    }
}

// Picks an alternative of a beat, fills its slots and articles, makes its first letter a capital, and appends it to the
// story.
static void story_append_beat(Story *s, const char *beat) {
    char sentence[SENTENCE_CAPACITY], filled[SENTENCE_CAPACITY];
    story_pick_alternative(s, beat, sentence, sizeof sentence);
    fill_sentence(s, sentence, filled, sizeof filled);
    if (s->length) story_put(s, ' ');
    size_t start = s->length;
    for (const char *p = filled; *p; p++) {
        story_put(s, *p == ARTICLE ? 'a' : *p);
        if (*p == ARTICLE && strchr("aeiou", p[2])) story_put(s, 'n');
    }
    s->text[start] = (char)toupper((unsigned char)s->text[start]);
}

// Writes story number `index` of the random stream `key`.
static void story_write(Story *s, uint64_t key, uint64_t index) {
    s->key = rng_key(key, index);
    s->draws = 0;
    s->length = 0;
    s->num_remembered = 0;
    s->hero_is_girl = story_pick(s, 2);
    s->friend_is_girl = story_pick(s, 2);
    for (const char *const *beat = PLOTS[story_pick(s, NUM_PLOTS)]; *beat; beat++) story_append_beat(s, *beat);
}

static FILE *create_file(const char *path) {
    FILE *f = fopen(path, "wb");
    if (!f) die("%s: cannot be created: %s", path, strerror(errno));
    return f;
}

static void write_bytes(FILE *f, const char *path, const void *data, size_t bytes) {
    if (fwrite(data, 1, bytes, f) != bytes) die("%s: cannot be written: %s", path, strerror(errno));
}

// Closes a file that has a temporary name and renames it to `path`: a file named `path` is always complete.
static void finish_file(FILE *f, const char *temporary, const char *path) {
    if (fflush(f) != 0 || fsync(fileno(f)) != 0) die("%s: cannot be written: %s", temporary, strerror(errno));
    if (fclose(f) != 0) die("%s: cannot be written: %s", temporary, strerror(errno));
    if (rename(temporary, path) != 0) die("%s: cannot be renamed to %s: %s", temporary, path, strerror(errno));
}

// Writes stories as tokens until their text has at least `bytes` bytes; the header comes last, when the count is known.
static void write_shard(const char *prefix, const char *split, int64_t bytes, uint64_t key) {
    char path[4096], temporary[4096];
    format_checked(path, sizeof path, "%s_%s.bin", prefix, split);
    format_checked(temporary, sizeof temporary, "%s.tmp", path);
    FILE *f = create_file(temporary);
    int32_t header[SHARD_HEADER_INTS] = {0};
    write_bytes(f, temporary, header, sizeof header);
    Story *story = (Story *)xcalloc(1, sizeof(Story));
    int64_t text = 0, stories = 0;
    for (; text < bytes; text += (int64_t)story->length, stories++) {
        uint16_t tokens[STORY_CAPACITY + 1] = {SEPARATOR};
        story_write(story, key, (uint64_t)stories);
        for (size_t i = 0; i < story->length; i++) tokens[i + 1] = (unsigned char)story->text[i];
        write_bytes(f, temporary, tokens, (story->length + 1) * sizeof *tokens);
    }
    header[0] = SHARD_MAGIC_U16;
    header[1] = 1;
    header[2] = (int32_t)(text + stories);
    if (fseek(f, 0, SEEK_SET) != 0) die("%s: %s", temporary, strerror(errno));
    write_bytes(f, temporary, header, sizeof header);
    finish_file(f, temporary, path);
    printf("%s: %lld stories, %lld tokens\n", path, (long long)stories, (long long)(text + stories));
    free(story);
}

static void write_table(const char *prefix) {
    const char separator[] = "<|endoftext|>";
    char path[4096], temporary[4096];
    format_checked(path, sizeof path, "%s.tokenizer", prefix);
    format_checked(temporary, sizeof temporary, "%s.tmp", path);
    FILE *f = create_file(temporary);
    uint32_t header[4] = {TOKENIZER_MAGIC, TOKENIZER_VERSION, BYTE_VALUES + 1, SEPARATOR}, one = 1,
             length = sizeof separator - 1;
    write_bytes(f, temporary, header, sizeof header);
    for (int i = 0; i < BYTE_VALUES; i++) {
        unsigned char byte = (unsigned char)i;
        write_bytes(f, temporary, &one, sizeof one);
        write_bytes(f, temporary, &byte, 1);
    }
    write_bytes(f, temporary, &length, sizeof length);
    write_bytes(f, temporary, separator, length);
    finish_file(f, temporary, path);
    printf("%s: %d tokens\n", path, BYTE_VALUES + 1);
}

// Returns `text` as a whole number. Dies unless it is one from `low` to `high`.
static int64_t parse_number(const char *option, const char *text, int64_t low, int64_t high) {
    char *end;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (!*text || *end || errno || value < low || value > high)
        die("--%s \"%s\": a whole number from %lld to %lld is expected", option, text, (long long)low, (long long)high);
    return value;
}

int main(int argc, char **argv) {
    static const char usage[] =
        "usage: synth_stories [--out PREFIX] [--bytes N] [--seed S]\n"
        "Writes generated stories as byte tokens: PREFIX_train.bin, PREFIX_val.bin and PREFIX.tokenizer.\n"
        "  --out PREFIX   where to write (data/synth)\n"
        "  --bytes N      bytes of training text (4000000); validation text of a twentieth of that is added\n"
        "  --seed S       seed; each gives other stories (42)\n";
    static const struct option options[] = {{"out", required_argument, NULL, 'o'},
                                            {"bytes", required_argument, NULL, 'b'},
                                            {"seed", required_argument, NULL, 's'},
                                            {"help", no_argument, NULL, 'h'},
                                            {NULL, 0, NULL, 0}};
    const char *prefix = "data/synth";
    int64_t bytes = 4000000, seed = 42;
    for (int c; (c = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        if (c == 'o') prefix = optarg;
        else if (c == 'b') bytes = parse_number("bytes", optarg, 1, 1000000000);  // the shard's count is an int32
        else if (c == 's') seed = parse_number("seed", optarg, 0, INT64_MAX);
        else if (c == 'h') return fputs(usage, stdout) < 0;
        else die("see synth_stories --help");
    }
    if (optind < argc) die("unexpected argument \"%s\"; see synth_stories --help", argv[optind]);
    write_table(prefix);
    write_shard(prefix, "train", bytes, rng_key((uint64_t)seed, 0));
    write_shard(prefix, "val", ceil_div(bytes, 20), rng_key((uint64_t)seed, 1));
    return 0;
}
