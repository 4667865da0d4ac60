"""Make the mock model's folder: a byte-level BPE tokenizer and a ChatML-like chat template.

The same bytes come out of every run: the corpus is in this file, the training below breaks ties by the pair
itself, and no library version has a say in the result. Run it after a change of the corpus::

    python scripts/make_mock_tokenizer.py src/kvrouter/text/data/mock

Ids lie in this order: the 256 bytes, the words (``words.txt`` lists them in the order of their ids),
everything else that training learned, the special tokens. A word is one token wherever it stands after a
space, because the model looks a whole pre-token up in the vocabulary before it merges anything
(``ignore_merges``), and the pre-tokenizer splits at every space.
"""

import heapq
import json
import sys
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

from tokenizers import pre_tokenizers

VOCABULARY_TOKENS = 4096
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

WORD_LIST = """
able about above accept account achieve act actual adapter add address admit advance advice afraid after
afternoon again against age agency agent ago agree air alert all allocate allow alone along already also
although always am among amount an ancient and anger angle animal announce annual answer any anyone apart
appear apple apply approach approve are area argue argument arm arrange array arrival arrive artist as
ask aspect assign assume async at atom attack attempt attend attract author autumn available average
avoid await awake aware baby back bad balance ball band bandwidth bank bar barely base basic basket bat
batch battle be beach bear beat beauty become bed bedroom been before began begin behind belief bell
belong beneath beside best better between beyond bicycle big bird bit bitset bitter black blanket blind
block blood blow blue board boat body bone book border born borrow both bother bottom bought box boy
brain branch brave bread break bridge brief bright bring broad broke brother brought brown brush bubble
bucket budget buffer build builder burden burn business busy but button buy by cabin cache call callback
came camera camp can cancel candle canvas capital captain car card care careful carpet carry case castle
cat catch cattle caught cause ceiling celebrate cement cent center central century ceremony certain chain
chair challenge chance change chapter character charge chart cheap check cheese cherry chick chief child
children choose chord chunk circle citizen city claim class clean clear clever client climate climb clock
close closure clothe cloud cluster coast coat coffee cold colleague collect colony color column come
comfort command comment commit common community company compare compile compiler complain complete
compress computer concern concert conclude condition config confirm conflict congress connect consider
consonant construct consume contact contain contest context continent continue contract control convince
cook cool copy corn corner correct corridor cost cotton could council counter country courage course
cousin cover cow craft crazy crease create cricket crisis critic crop cross crowd cry culture curious
current curtain custom cut cycle dad daemon damage dance danger dark dashboard daughter day deadline deal
dear debate debug decade decide decimal decline decode deep defend degree delay delete deliver demand
dentist deny depend deploy deposit derive describe desert deserve design desire destroy detail determine
develop device diagram diamond diary dictionary did differ difficult dinner direct dirty discuss disease
dish dispatch display distance district divide division do doctor does dog dollar domain domestic done
door double down download dozen drain drama draw drawer dream dress drink drive driver drop dry duck
during dust each eager eagle ear early earth ease east eat economy edge editor education effect effort
eight either elbow elder elect electric element eleven else emerge emotion empire employ empty encrypt
end enemy energy engine enjoy enough enter entire enum envelope equal equip error escape especially essay
even evening event ever every evict evidence evil exact examine example except exchange excite exercise
exhibit exist expect experience experiment expire explain explore export express extension extra eye face
fact factor factory fair fairly faith fall false family famous far farm fashion fast fat father fault
favor fear feature feed feel feet fell fellow fence festival fever few fiber field fifteen fig fight
figure fill filter final find fine finger finish fire firm first fish fit five flag flame flat flavor
flight float flood floor flow flower fly folk follow food foot for force foreign forest form format
fortune forty forward found four fraction frame free frequent fresh friend from front frozen fruit full
fun function funny future gallery game garbage garden gas gateway gather gauge gave generator gentle
gentleman get giant ginger girl give glad glance glass globe glory glove go goal gold gone good got
govern grain grand grandmother grant graph grass grateful gray great greedy green grew ground group grow
guard guess guest guide guitar habit had hair half hammer hand handle handler happen happy harbor hard
harvest has hash hat have he head health healthy heap hear heard heart heat heavy height held help her
here hidden high hill him his histogram history hit hobby hold hole holiday hollow home honest honey hope
horizon horse hot hotel hour house how huge human hundred hunger hunt hurry husband idea if image imagine
impact import improve in inch income index indicate industry inform injury inner insect insert inside
insist inspect install instant instrument intend interest interface invent invite iron is island it item
iterator jacket jewel job join journal journey joy judge juice jump junior just justice keep kept kernel
kettle key kind king kitchen knee knew knife knock know label ladder lady lake lambda lamp land language
laptop large last late latency laugh laundry law lawyer lay layer lead leader leaf league learn lease
least leather leave lecture led ledger left leg legal lemon less lesson let letter level liberty library
lie life lift light like line link liquid list listen little live lively local locate log lone lonely
long look lookup lost lot loud love lovely low lucky lunch luxury machine macro made magazine magic
magnet main major make man manage manner many map margin marine mark market marriage mass master match
material matrix may me meadow meal mean meant measure meat media medical meet melody member memory men
mention merchant mercy merge message metal method metric middle might mild mile military milk million
mind mine minute mirror miss mistake mix mobile model modern modest module molecule moment money month
moon more morning mosaic most mother motion motor mount mountain mouse mouth move movie much muscle
museum music must my mystery name narrow nation native natural nature near necessary neck need needle
neighbor neither nephew nerve network never new news next night nine no noble node noise noon nor normal
north nose note notebook nothing notice noun novel now number numeral nurse obey object observe observer
occur ocean of off offer office offload often oil old on once one only open operate opposite optimize or
order organ original other our out oven over own owner oxygen package packet page paint pair palace paper
parade paragraph parameter pardon parent park parse part particular party pass passage past patch path
patient pattern pause pay peace penalty pencil people pepper percentile perfect perhaps period permit
person phone photo phrase piano picture piece pilot pioneer pitch pizza place plain plan plane planet
plant platform play please pleasure plenty plugin plural pocket poem poet point pointer police policy
polite politics poor popular populate port pose position possible post potato pound poverty powder power
practice praise prefer prefetch prefill prefix prepare present press pressure pretty prevent price pride
priest prince print prison private prize probe problem process produce product profile profit progress
project promise prompt proof proper property protect protocol proud prove provide proxy public publish
pull purple purpose push put puzzle quality quantity quart quarter queen question queue quick quiet quite
quotient rabbit race rack radio rail railway rain raise ran random range rapid rare rather reach read
ready real reason rebase receive recent recipe record recover red reduce reference refresh refuse region
regret regular reject relate relax release rely remain remember remind remote remove render renew rent
repair repeat replace replay replica reply report request require rescue reserve resist respect response
responsible rest restart restaurant result resume retire retry return reveal review revoke reward rhythm
ribbon rice rich right ring rise ritual rival river road rock roll rollback roof room root rope rose
rough round route router row royal rub rude rule run runtime rural saddle safe said sail sailor salad
salt same sample sand sat satisfy sauce save saw say scale scene schedule schema scholar school science
scissors scope score screen sculpture sea search season seat second secret section secure see seed seem
segment select self sell send senior sense sent sentence separate serialize serious serve server service
session set settle seven several severe shadow shall shallow shame shape shard share sharp she sheet
shell shelter shift shine ship shirt shock shoe shop shore short should shoulder shout show shower
shutdown side sight sign silence silent silk silver similar simple since sincere sing singer single
sister sit six size sketch skill skin sky sleep sleepy slight slip slope slot slow small smell smile
smooth snapshot snow so soccer social society socket soft softmax soil soldier solid solution solve some
somebody son song soon sorrow sort soul sound soup source south span spare special speech speed spell
spend spider spirit split spoke spoon sport spot spread spring square stable stack staff stage stair
stand star start state station statue stay steady steam steel step stick still stomach stone stood stop
store storm story stove straight strange strategy stream street stretch strict strike string strong
struct struggle student studio study style subject subscribe substance subtract success such sudden
suffer suffix sugar suggest suit suitable summer sun sunny supply support sure surface surprise survive
suspend sweater sweet swim switch symbol sympathy system table tail tailor taint take talent talk tall
target task taste taxi tea teach team tears technique teeth telephone tell temperature template temple
ten tender tennis tensor tent term test than thank that the theater their them then theory there these
they thick thief thin thing think third thirty this those though thought thousand thread three throat
through throughput throw thunder thus ticket tidy tie tiger time timeout tiny title to together token
told tomato tomorrow tone tongue tonight too took tool top topology torch total touch tour toward towel
tower town toy trace track trade tradition traffic tragedy train travel treasure treat treaty tree trend
trial triangle tribe trip tropical trouble truck true trust truth try tube tunnel tuple turn twelve
twenty twin twist two type ugly umbrella uncle under uniform union unique unit universe university until
up update upload upper upset urban urgent us use useful usual vacation validate valley valuable value
variable variety vast vector vegetable vehicle venture verify version vertex very victim victory video
view village violet violin virtue visible vision visit visitor vital voice volume vote vowel voyage wage
wait walk wall want war warm was wash waste watch water wave way we wealth wear weather weave wedding
week weekend weight welcome well went were west western what wheel when where whether which while whisper
white who whole whose why wide widow wife wild will willing win wind window wing winter wire wisdom wish
with witness wizard wolf woman women wonder wood work worker workshop world worry worth would wound
wrapper write written wrong wrote yard year yellow yes yesterday yet you young your youth zebra zero zone
"""

PROSE = """
A router stands before a fleet of engines. When a request arrives, it reads which worker already holds the
blocks of the prompt, how busy every worker is, and where each of them sits, and then it sends the request to
the one that will answer soonest. What it isn't told, it doesn't guess: an unknown worker's cache counts as
empty, and a worker that we've lost isn't asked again until it's come back. You'll find that most of the work
was done before: the same instructions, the same documents, the same first turns of a conversation.

"Why did this request go there?" is the question that's asked at three in the morning; the answer should be a
table, not an afternoon's reading. They'd rather see a number than hear a promise. Don't hide a failure, don't
retry forever, and don't let one slow reader hold up the others. I'm sure that he'll agree, and she's agreed
already. Let's write it down: first the decision, then the deed. (Nothing is ever sent before that.)

The weather was cold and the harbour was quiet. Two boats had come in during the night, carrying salt, timber
and letters from people whom nobody remembered. The old woman at the window counted them, as she had counted
every boat for forty years, and wrote the number into a small green book. Later, children came running down
the hill, shouting about a whale; there wasn't one, of course, but everybody went to look.

Dear customer, thank you for your question. Please check that the cable is connected, restart the machine, and
wait for two minutes. If the light is still red, write to us again with the number on the back of the box, and
we'll send you a new one. You are a helpful assistant. Answer in one sentence. Summarise the following text.
Translate this into French. What is the capital of Norway? How many days are there in a leap year? Explain,
step by step, why the sky is blue. Once upon a time there was a king who had three daughters.

# Heading\n\n- first item\n- second item\n\n1. one\n2. two\n\n| name | value |\n|------|-------|\n| a | 1 |\n
**bold** *italic* `code` [link](https://example.com/path?query=1&page=2) ---
... !!! ??? ;;; ::: == != <= >= -> =>
"""

CODE = """
import os
from collections.abc import Iterable, Sequence

class Node:
    def __init__(self, name: str, value: int = 0) -> None:
        self.name = name
        self.value = value

    def total(self, others: Sequence["Node"]) -> int:
        if not others:
            return self.value
        for other in others:
            self.value += other.value
        return self.value

def main(argv: list[str]) -> int:
    try:
        print("hello, world", len(argv), {"key": [1, 2, 3], "flag": True, "none": None})
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    return 0

fn add(left: u32, right: u32) -> Option<u32> { left.checked_add(right) }
let mut items: Vec<String> = Vec::new(); for item in &items { println!("{}", item); }
for (int i = 0; i < 10; i++) { printf("%d\\n", i); }
const answer = async () => { await fetch("/v1/models"); return undefined; };
SELECT id, name FROM users WHERE age >= 18 ORDER BY name LIMIT 100;
{"model": "mock", "messages": [{"role": "user", "content": "hi"}], "stream": true, "max_tokens": 16}
<div class="page"><p>text</p></div> #!/bin/bash\nset -euo pipefail\necho "$HOME" | grep -v tmp > out.txt
"""

SCRIPTS = """
Der Zug fährt um zwölf Uhr ab, und wir müssen noch Brötchen kaufen. Schöne Grüße aus München, straße, morgen.
Où est la bibliothèque ? L'été dernier, nous avons mangé des crêpes à la fenêtre. C'était agréable, voilà.
¿Dónde está la estación? El niño comió una manzana mañana por la mañana. ¡Qué día más bonito, señor!
Não há problema, a reunião começa às três. Żółw idzie powoli, a zając śpi pod drzewem. Příliš žluťoučký kůň.
Привет, как дела? Сегодня хорошая погода, и мы идём гулять в парк. Это очень простой вопрос, спасибо.
Καλημέρα, τι κάνεις; Η θάλασσα είναι ήσυχη σήμερα. Σας ευχαριστώ πολύ για την απάντηση.
שלום, מה שלומך היום? תודה רבה על התשובה. مرحبا، كيف حالك اليوم؟ شكرا جزيلا على الجواب.
नमस्ते, आप कैसे हैं? आज मौसम बहुत अच्छा है। धन्यवाद। สวัสดีครับ วันนี้อากาศดีมาก ขอบคุณครับ
你好，今天天气很好，我们去公园散步吧。这个问题很简单，谢谢你的回答。中国人民的语言文字。
こんにちは、今日はとても良い天気です。質問に答えてくれてありがとうございます。東京から京都まで。
안녕하세요, 오늘은 날씨가 아주 좋습니다. 질문에 답해 주셔서 감사합니다. Xin chào, hôm nay trời đẹp quá.
😀 😂 🙏 👍 ❤️ 🎉 🚀 🔥 ✅ ❌ 👩‍💻 👨‍👩‍👧 🇳🇴 🇯🇵 😀😀😀 👍👍 → ← ≤ ≥ ≠ × ÷ ± € £ “quoted” ‘so’ – — … • ☕ ⚡ 🌍
"""

CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {%- set function = call.function %}
        {{- '\\n<tool_call>' + ({'name': function.name, 'arguments': function.arguments} | tojson) }}
        {{- '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

Pair = tuple[str, str]
WORDS = WORD_LIST.split()


def byte_alphabet() -> list[str]:
    """Return the 256 characters that stand for the bytes 0 to 255 in a byte-level vocabulary."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(shifted)) for byte in range(256)]


def numbers() -> str:
    """Return text made of numbers as they stand in dates, prices, versions and addresses."""
    plain = " ".join(str(n) for n in range(0, 1000, 3))
    dates = " ".join(f"{year}-{year % 12 + 1:02}-{year % 28 + 1:02}" for year in range(1970, 2031))
    return f"{plain}\n{dates}\n$19.99 3.14159 10.0.0.1:8080 1e-6 100% 0x7fff 12:30 v1.2.3 #42"


def count_pretokens() -> Counter[str]:
    """Return every pre-token of the corpus, in the byte alphabet, with how often it occurs."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    counts: Counter[str] = Counter()
    for text in (PROSE, CODE, SCRIPTS, numbers(), " " + " ".join(WORDS), "\n".join(WORDS)):
        counts.update(piece for piece, _ in split.pre_tokenize_str(text))
    return counts


def learn_merges(counts: Counter[str], words: set[str], limit_tokens: int) -> list[Pair]:
    """Return merges in order until they and ``words`` make ``limit_tokens`` distinct tokens.

    The most frequent pair goes first; the smaller pair goes first among equals.
    """
    pieces = [(list(text), count) for text, count in sorted(counts.items())]
    frequency: Counter[Pair] = Counter()
    places: defaultdict[Pair, set[int]] = defaultdict(set)
    for place, (parts, count) in enumerate(pieces):
        for pair in pairwise(parts):
            frequency[pair] += count
            places[pair].add(place)
    heap = [(-count, pair) for pair, count in frequency.items()]
    heapq.heapify(heap)
    merges: list[Pair] = []
    made = set(words)
    while len(made) < limit_tokens:
        count, pair = heapq.heappop(heap)
        if -count != frequency[pair]:
            continue
        merges.append(pair)
        made.add(pair[0] + pair[1])
        for touched in merge_everywhere(pair, pieces=pieces, places=places, frequency=frequency):
            heapq.heappush(heap, (-frequency[touched], touched))
    return merges


def merge_everywhere(
    pair: Pair,
    *,
    pieces: list[tuple[list[str], int]],
    places: defaultdict[Pair, set[int]],
    frequency: Counter[Pair],
) -> list[Pair]:
    """Join ``pair`` wherever it stands and return, sorted, the pairs whose frequency changed."""
    touched: set[Pair] = set()
    for place in places.pop(pair):
        parts, count = pieces[place]
        for old in pairwise(parts):
            frequency[old] -= count
            touched.add(old)
        at = 0
        while at < len(parts) - 1:
            if (parts[at], parts[at + 1]) == pair:
                parts[at : at + 2] = [pair[0] + pair[1]]
            at += 1
        for new in pairwise(parts):
            frequency[new] += count
            places[new].add(place)
            touched.add(new)
    return sorted(each for each in touched if frequency[each] > 0)


def special_token(token_id: int, content: str) -> dict[str, object]:
    """Return the entry of a special token in ``added_tokens``."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, **flags, "special": True}


def make_tokenizer() -> dict[str, object]:
    """Return the content of ``tokenizer.json``."""
    alphabet = byte_alphabet()
    space = alphabet[ord(" ")]
    words = [space + word for word in WORDS]
    limit_tokens = VOCABULARY_TOKENS - len(alphabet) - len(SPECIAL_TOKENS)
    merges = learn_merges(count_pretokens(), set(words), limit_tokens)
    tokens = list(dict.fromkeys([*alphabet, *words, *(left + right for left, right in merges)]))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            special_token(token_id, content) for token_id, content in enumerate(SPECIAL_TOKENS, len(tokens))
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": [f"{left} {right}" for left, right in merges],
        },
    }


def make_files() -> dict[str, str]:
    """Return the text of every file of the folder by its name."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    return {
        "tokenizer.json": json.dumps(make_tokenizer(), ensure_ascii=False, indent=0) + "\n",
        "tokenizer_config.json": json.dumps(config, ensure_ascii=False, indent=0) + "\n",
        "words.txt": "\n".join(WORDS) + "\n",
    }


def main(folder: Path) -> None:
    """Write the files into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in make_files().items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
