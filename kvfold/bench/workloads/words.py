"""Words for keys and lists: common English adjectives and nouns, their pairs, and what stands for nothing (uuids)."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from uuid import UUID


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ADJECTIVES = _words(
    "able alert amber ample ancient apt arid awake bare basic bitter blank bold brave brief bright brisk broad "
    "busy calm careful cheap clean clear clever coarse cold cosy crisp curious daily damp dapper dark deep dense "
    "dry dull dusty eager early easy elegant empty equal exact faint fair famous fancy fast fierce final firm "
    "flat fond formal frail free fresh frosty full gentle giant glad golden grand grave great hardy harsh hasty "
    "hearty heavy hidden hollow honest huge humble icy ideal idle ivory jolly just keen kind large late lazy lean "
    "level light little lively lone long loose loud loyal lucky mad major mellow merry mild minor misty modern "
    "modest mute narrow naval neat new nimble noble noisy novel odd open orange oval pale patient plain polite "
    "poor proud pure quaint quick quiet rapid rare raw ready regal rich ripe rough round royal rural rustic safe "
    "salty scarce secret sharp shiny short shy silent silver simple sleek slim slow small smart smooth soft solid "
    "sour spare square stable steep stern stiff still stout strict strong sturdy subtle sunny sweet swift tall "
    "tame tart tender tense thick thin tidy timid tiny tired tough true upper urban vague vain vast velvet violet "
    "vivid warm wary weary wet wide wild wise wistful witty worthy young zesty"
)
NOUNS = _words(
    "acorn actor album alley anchor angle ankle apple apron arch arrow artist attic aunt autumn badge badger "
    "bakery ballad bamboo banjo banner barley barn barrel basket battery beach beacon beaver bell bench berry "
    "bicycle bishop blanket blossom boat bonnet border bottle boulder bowl branch brass bread brick bridge broom "
    "bucket buckle butter button cabin cable cactus camel candle canoe canvas canyon captain carpet carrot castle "
    "cattle cave cedar cellar chair chalk chapel cherry chest chimney circle clay cliff clock cloud clover coast "
    "cobbler coffee coin collar comet compass copper coral cotton cousin cradle crane crater crayon creek cricket "
    "crown crystal cupboard curtain cushion dagger dairy dancer dawn deer desert diamond dinner doctor dolphin "
    "donkey door dragon drawer drum eagle earth echo elbow elder elm ember engine envelope falcon farmer feather "
    "fence ferry fiddle finger flag flame flute forest fossil fountain fox frame friend fruit furnace garden "
    "garlic gate ginger giraffe glacier glass glove goat goblet grain granite grape gravel guitar hammer harbor "
    "harp harvest hatchet hazel heron hill honey hoof horizon horse hotel hunter icicle ink insect iron island "
    "jacket jar jewel judge juice jungle kettle kitchen kite ladder lagoon lake lantern lawyer leaf leather lemon "
    "letter library lily linen lion lizard lobster locket lumber magnet mango mantle maple marble market mask "
    "mason meadow medal melon mill mineral mirror mitten monk moon moss mountain muffin musket mustard napkin "
    "nephew nest nickel oak oasis oat ocean olive onion orchard orchid otter oven owl oyster paddle painter "
    "palace panther paper parcel parrot pasture pebble pelican pencil pepper piano pigeon pillar pillow pine "
    "pirate planet plaster plum pocket poet pond poppy porch potter prairie prince pumpkin puppet quarry quilt "
    "rabbit raccoon raft railway raven ribbon river robin rocket root rope saddle sailor salmon sandal satchel "
    "scarf school seed shadow shelf shepherd shield ship shovel signal singer sister sleeve sparrow spider spoon "
    "spruce squirrel stable statue stone stove straw summer swallow table tailor teapot temple thimble thistle "
    "thunder tiger timber tinsel torch towel tower tractor trumpet tulip tunnel turkey turnip turtle twig "
    "umbrella uncle valley vessel village vine violin wagon walnut walrus weaver whale wheat whistle willow "
    "window winter wolf yarn zebra"
)
SINGLE = tuple(sorted({*ADJECTIVES, *NOUNS}))


def pairs(random: Random) -> Iterator[str]:
    """Adjective-noun pairs without end, each once as long as there are new ones."""
    seen: set[tuple[str, str]] = set()
    while True:
        if len(seen) == len(ADJECTIVES) * len(NOUNS):
            seen.clear()
        if (pair := (random.choice(ADJECTIVES), random.choice(NOUNS))) not in seen:
            seen.add(pair)
            yield "-".join(pair)


def words(random: Random) -> Iterator[str]:
    """Single words in random order, each once; then pairs of them."""
    yield from random.sample(SINGLE, len(SINGLE))
    yield from pairs(random)


def numbers(random: Random, num_digits: int = 7) -> Iterator[str]:
    """Distinct numbers that do not begin with a zero."""
    seen: set[int] = set()
    while True:
        if (number := random.randrange(10 ** (num_digits - 1), 10**num_digits)) not in seen:
            seen.add(number)
            yield str(number)


def uuids(random: Random) -> Iterator[str]:
    """Version 4 identifiers."""
    while True:
        yield str(UUID(int=random.getrandbits(128), version=4))
