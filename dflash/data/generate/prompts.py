"""The questions that a target answers to make training text: those of a file, or our own.

Our own are templates x topics, always the same list in the same order. Prompts that a data file already holds can be
left out with `exclude`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from dflash.data.chat import Chat, UnusableRow, chat_of, question_of
from dflash.data.conversations import MAX_SKIPPED, refuse_skipped
from dflash.data.reading import iter_rows
from dflash.data.report import DataReport
from dflash.errors import DataError

TEMPLATES = (
    "Explain what {} is.",
    "Give me three facts about {}.",
    "Why does {} matter?",
    "List five tips related to {}.",
    "Write a short story that mentions {}.",
    "Write a Python function related to {}.",
    "Write a haiku about {}.",
    "Summarize the history of {}.",
    "What are common misconceptions about {}?",
    "How would you teach {} to a beginner?",
    "Describe {} in one sentence, then in detail.",
    "What questions should I ask an expert on {}?",
    "Compare {} with something similar.",
    "Write a dialogue between two friends about {}.",
    "Write a short paragraph about {} for a child.",
    "What should everyone know about {}?",
    "Write a short email to a colleague about {}.",
    "What are the advantages and disadvantages of {}?",
    "Give an example of {} from everyday life.",
    "Write a short poem about {}.",
    "How has {} changed over time?",
    "Make a quiz with three questions and answers about {}.",
    "Explain {} step by step.",
    "What problems can come up with {}, and how can I solve them?",
    "Write the opening paragraph of an essay on {}.",
    "Tell me something surprising about {}.",
)

_TOPICS = """
nature: glaciers, coral reefs, earthquakes, hurricanes, rainbows, tides, deserts, rainforests, tornadoes,
 lightning, waterfalls, caves, mushrooms, moss, oak trees, bamboo, cacti, orchids, sunflowers, seaweed,
 wolves, elephants, owls, penguins, dolphins, octopuses, sharks, sea turtles, bats, spiders, ants,
 butterflies, salmon, frogs, crows, beavers, polar bears, giraffes, chameleons, hummingbirds, earthworms,
 jellyfish, whales, cheetahs, squirrels, migration, hibernation, camouflage, pollination, soil erosion, the
 water cycle, food chains, wetlands, tundra, fossils, seasons
science: gravity, magnetism, electricity, atoms, molecules, the periodic table, acids and bases, chemical
 bonds, radioactivity, nuclear fusion, light waves, sound waves, friction, momentum, energy conservation,
 entropy, relativity, quantum mechanics, superconductors, lasers, telescopes, microscopes, the scientific
 method, genetics, DNA, evolution, natural selection, cells, bacteria, viruses, vaccines, antibiotics, the
 immune system, enzymes, proteins, stem cells, plate tectonics, minerals, the ozone layer, climate change,
 the greenhouse effect, carbon dating, buoyancy, pressure, thermodynamics, semiconductors, crystals,
 osmosis, mitosis, neurons, the nervous system, metabolism, hormones
space: the moon, the sun, Mars, Jupiter, Saturn's rings, comets, asteroids, meteor showers, galaxies, the
 Milky Way, supernovas, neutron stars, the big bang, exoplanets, space stations, satellites, rockets,
 astronauts, solar eclipses, the speed of light, dark matter, gravitational waves, constellations, space
 telescopes, the space race
technology: solar panels, wind turbines, electric cars, batteries, 3D printing, robots, drones, smartphones,
 GPS, Bluetooth, Wi-Fi, fiber optics, touch screens, barcodes, QR codes, search engines, video games,
 virtual reality, digital cameras, printers, microwaves, refrigerators, elevators, bridges, skyscrapers,
 tunnels, dams, steam engines, jet engines, helicopters, submarines, trains, sewing machines, clocks,
 compasses, the printing press, radio, television, the telephone, LED lights, thermostats, air conditioning,
 water purification, recycling, self-driving cars
computing: variables, for loops, functions, classes, inheritance, dictionaries, sets, tuples, strings,
 binary search, sorting algorithms, hash tables, linked lists, stacks, queues, binary trees, graphs, dynamic
 programming, big O notation, regular expressions, unit testing, debugging, version control, Git branches,
 databases, SQL joins, indexes, APIs, JSON, HTML, CSS, JavaScript, operating systems, file systems, threads,
 processes, memory management, garbage collection, compilers, interpreters, decorators, generators, list
 comprehensions, exceptions, logging, caching, cloud computing, containers, virtual machines, firewalls,
 passwords, phishing, neural networks, decision trees, linear regression, clustering, reinforcement
 learning, computer vision, speech recognition, chatbots, open source software, code review, pair
 programming, agile development, user interfaces, accessibility, web browsers, email, spreadsheets, data
 privacy
mathematics: prime numbers, fractions, percentages, negative numbers, square roots, exponents, logarithms,
 pi, the Pythagorean theorem, triangles, circles, symmetry, fractals, probability, averages, standard
 deviation, correlation, statistics, algebra, calculus, derivatives, integrals, matrices, vectors, set
 theory, Boolean logic, game theory, the Fibonacci sequence, the golden ratio, Roman numerals, binary
 numbers, infinity, geometric proofs, magic squares, compound interest, unit conversion, rounding, random
 numbers, permutations, graph theory
health: exercise, stretching, running, swimming, walking, weight lifting, meditation, breathing exercises,
 posture, healthy eating, vitamins, protein, fiber, hydration, sugar, salt, allergies, headaches, the common
 cold, first aid, hand washing, dental care, eyesight, hearing, skin care, stress, anxiety, burnout, habits,
 mindfulness, friendship, loneliness, napping, jet lag, sunscreen, blood pressure, the heart, the lungs,
 digestion, muscles, bones, memory
food: bread, cheese, chocolate, tea, olive oil, rice, pasta, pizza, sushi, soup, salads, spices, garlic,
 tomatoes, potatoes, apples, bananas, honey, butter, yogurt, ice cream, pancakes, sandwiches, tacos, curry,
 dumplings, barbecue, baking, fermentation, pickling, grilling, meal planning, food safety, kitchen knives,
 sourdough, vegetarian cooking, breakfast, street food, leftovers, school lunches
history: ancient Egypt, the pyramids, ancient Greece, the Renaissance, the Industrial Revolution, the Silk
 Road, the Vikings, the Middle Ages, knights, castles, samurai, the Ottoman Empire, the Mongol Empire, the
 Aztecs, the Incas, the Maya, the American Revolution, the Civil War, World War I, World War II, the Cold
 War, the Great Depression, the civil rights movement, women's suffrage, the Magna Carta, the Black Death,
 the age of exploration, pirates, the gold rush, the Berlin Wall, the Great Wall of China, Pompeii, the
 Library of Alexandria, archaeology, mythology, the Olympic Games, the abolition of slavery, the
 Enlightenment, museums, the invention of writing, coins, calendars
society: democracy, elections, voting, constitutions, human rights, taxes, laws, courts, juries, diplomacy,
 citizenship, newspapers, advertising, public libraries, schools, universities, homework, volunteering,
 charity, public transport, city planning, traffic, housing, immigration, languages, translation, sign
 language, holidays, weddings, birthdays, manners, teamwork, leadership, negotiation, conflict resolution,
 public speaking, job interviews, resumes, remote work, meetings, time management, procrastination, goal
 setting, note taking, critical thinking, curiosity, kindness, honesty
money: saving money, credit cards, mortgages, inflation, interest rates, the stock market, bonds, insurance,
 retirement, supply and demand, international trade, small businesses, startups, marketing, customer
 service, accounting, invoices, salaries, unemployment, cryptocurrency, banks, emergency funds, tipping,
 online shopping, supply chains, pricing
arts: painting, sculpture, watercolors, oil painting, photography, calligraphy, origami, pottery, knitting,
 quilting, architecture, fashion, ballet, hip-hop dance, theater, opera, classical music, rock music, the
 piano, the guitar, the violin, drums, singing, songwriting, rhythm, movies, animation, comic books, novels,
 fairy tales, science fiction, mystery stories, biographies, metaphors, rhyme, plot twists, dialogue,
 Shakespeare, impressionism, street art, color theory
hobbies: camping, hiking, fishing, bird watching, stargazing, surfing, skiing, rock climbing, skateboarding,
 soccer, basketball, tennis, baseball, golf, table tennis, martial arts, archery, sailing, kayaking,
 cycling, board games, crossword puzzles, jigsaw puzzles, card games, magic tricks, juggling, model trains,
 stamp collecting, scrapbooking, woodworking, home repair, beekeeping, composting, houseplants, aquariums,
 dog training, cats, horses, road trips, travel planning, packing a suitcase, train travel, airports, maps,
 journaling, blogging, podcasts, learning a language
places: Paris, Tokyo, London, New York City, Rome, Cairo, Sydney, Rio de Janeiro, Iceland, Japan, India,
 Brazil, Kenya, Canada, Antarctica, the Amazon River, the Nile, the Sahara, the Himalayas, Mount Everest,
 the Grand Canyon, the Alps, the Great Barrier Reef, Venice, Hawaii, the Arctic, the Pacific Ocean,
 Switzerland, Mexico, Greece
"""


def topics() -> list[str]:
    """All topics, without repeats, in the order written above."""
    names: dict[str, None] = {}
    for line in _TOPICS.strip().replace("\n ", " ").splitlines():
        names.update(dict.fromkeys(name.strip() for name in line.split(":", 1)[1].split(",")))
    return list(names)


def make_prompts(exclude: Iterable[str] = (), limit: int | None = None) -> list[str]:
    """Distinct prompts, the templates interleaved so that any first part of the list holds all of them.

    Prompt number i takes template `i mod 26` and a topic that steps with it, so neighbours share neither.
    """
    names, known = topics(), set(exclude)
    prompts: dict[str, None] = {}
    for start in range(len(names)):
        for index, template in enumerate(TEMPLATES):
            prompt = template.format(names[(start + 37 * index) % len(names)])
            if prompt not in known:
                prompts[prompt] = None
    return list(prompts)[:limit]


def prompts_in(path: str | Path) -> set[str]:
    """The first user message of every conversation in a data file (any kind that `dflash.data` reads). DataError for a file
    without any: nothing would be left out."""
    found = set()
    for _, row in iter_rows(path):
        try:
            turns = () if isinstance(row, UnusableRow) else chat_of(row).turns
        except UnusableRow:
            continue
        found.update([turn.content for turn in turns if turn.role == "user"][:1])
    if not found:
        raise DataError(f"{path} holds no conversation whose prompt could be left out; give a data file, or no --exclude")
    return found


@dataclass
class Questions:
    """Chats that wait for an answer, the place of each, and what was left out of their file."""

    report: DataReport
    chats: list[tuple[str, Chat]] = field(default_factory=list)

    def rendered(self, read: Callable[[Chat], list[int]]) -> list[tuple[Chat, list[int]]]:
        """Each chat with the ids that the target is given; what its template refuses is left out and counted.

        Raises DataError, with the reasons, when too many rows of the file had to be left out.
        """
        found = []
        for place, chat in self.chats:
            try:
                found.append((chat, read(chat)))
            except UnusableRow as reason:
                self.report.skip(place, reason)
        if self.chats:
            refuse_skipped(self.report, bool(found), MAX_SKIPPED, "prompts")
        return found


def read_prompts(path: str | Path) -> Questions:
    """Questions from any file that `dflash.data` reads, its last answers dropped; or from one with a prompt a line.

    Raises DataError, with the reasons, when more than a tenth of the rows hold none.
    """
    if not Path(path).expanduser().exists() and "," not in str(path):
        raise DataError(f"there is no prompts file {path}; give a file with one prompt a line, or any data file")
    found = Questions(DataReport(str(path)))
    for place, row in iter_rows(path, text=True):
        found.report.rows += 1
        try:
            if isinstance(row, UnusableRow):
                raise row
            found.chats.append((place, question_of(row)))
        except UnusableRow as reason:
            found.report.skip(place, reason)
    if not found.report.rows:
        raise DataError(f"there are no prompts in {path}; give a file with one prompt a line, or any data file")
    refuse_skipped(found.report, bool(found.chats), MAX_SKIPPED, "prompts")
    return found
