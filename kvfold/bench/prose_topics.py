"""Topics of the generated filler text: word lists and sentence patterns of each subject (see prose.py)."""

from __future__ import annotations

from kvfold.bench.prose import topic

TOPICS = (
    topic(
        "the fishermen, the harbour pilots, the net menders, the ferry crew, the dockers",
        "the harbour, the old quay, the fish market, the lighthouse, the boathouse",
        "tarred rope, the evening tide, a mended net, the fog signal, dried cod, the keel",
        """
        The boats returned {when}, low in the water and smelling of {what}.
        {name} had painted the hull {colour} because no other paint was left.
        {who_} judged the wind by the flags over {where} and were rarely mistaken.
        When the swell was high, {what} had to be tied down twice.
        A gull with one leg had lived on {where} for {while}.
        {name} could splice a line in the dark, {manner}.
        The ferry left {when}, whether or not the bakers had come aboard.
        Salt had eaten the hinges of {where}, so the doors stood open all year.
        From {where} one could see three islands and, on clear days, a fourth.
        {name2} sold bait and advice, and charged only for the bait.
        Along the mole, {who} hung {what} to dry on {colour} frames.
        The pilots spoke of the sandbank as of a {quality} relative.
        A bell without a clapper hung over {where}, rung by hand with a hammer.
        """,
    ),
    topic(
        "the bakers, the apprentices, the millers, the early customers, the delivery boys",
        "the bakery, the mill, the cellar, the flour store, the corner shop",
        "rye bread, the sourdough, a tray of rolls, fresh yeast, poppy seed, the oven door",
        """
        The dough rested {when} under a {colour} cloth.
        {name} weighed nothing and yet every loaf came out the same.
        In {where} the air was so dusty that {who} talked with their hands.
        The secret of {what}, {name2} insisted, is the temperature of the water.
        {who_} slept while the town was awake and the other way round.
        A cracked stone in the oven left a {quality} mark on every third loaf.
        Children waited behind {where} for the ends of {what}.
        When the mill stood still, bread was made from chestnuts and {feeling}.
        {name} slashed each loaf {manner}, always from left to right.
        The recipe had been copied so often that the salt had been lost.
        Customers bought {what} {when} and stayed to talk about the weather.
        On holidays, {who} baked a wheel so large that it was rolled home.
        """,
    ),
    topic(
        "the gardeners, the beekeepers, the orchard owners, the neighbours, the seed collectors",
        "the orchard, the greenhouse, the kitchen garden, the nursery, the herb terrace",
        "the pear trees, compost, a row of beans, wild thyme, the rain barrel, the grafting knife",
        """
        The pear trees flowered {when}, {colour} against the wall.
        {name} pruned too late every year and harvested more than anyone.
        Bees from {where} were seen as far away as the railway line.
        {who_} exchanged cuttings wrapped in newspaper and {feeling}.
        A {quality} hedge keeps out the wind but not the hares.
        Nothing grew under the walnut, so {name2} kept {what} there.
        The soil in {where} was {colour}, heavy and full of broken pottery.
        Slugs ate {what} in one night, and {name} planted it again {manner}.
        The gate of {where} was locked only during the cherry season.
        To graft an old variety, {who} cut the wood {when} and bury it in sand.
        Rain was measured in an enamel pot and entered in a {colour} diary.
        A scarecrow wearing the coat of the former mayor guarded {what}.
        """,
    ),
    topic(
        "the station master, the signalmen, the commuters, the track workers, the conductors",
        "the junction, the waiting room, the signal box, the branch line, the goods yard",
        "the night train, a torn timetable, the station clock, a lost umbrella, the points lever, the parcel scales",
        """
        The night train stopped at the junction {when}, although nobody got off.
        {name} knew the sound of every carriage and the name of every dog.
        In {where} the stove was lit from the first frost to the last.
        {who_} set their watches by {what}, which was a mistake.
        A {colour} lamp meant caution; a {quality} whistle meant breakfast.
        The branch line was closed for {while} and reopened {manner}.
        {name2} collected tickets from places that no longer exist.
        Weeds grew between the rails of {where}, and goats kept them short.
        The announcement was read {manner}, so that no one understood it.
        Somebody had left {what} on the seat beside the window.
        The bridge hums when a train is near, which {who} call singing.
        Freight went by water in those days, and passengers went {when}.
        """,
    ),
    topic(
        "the weavers, the dyers, the tailors, the lace makers, the wool merchants",
        "the weaving shed, the dye works, the cloth hall, the attic, the drying field",
        "the loom, a bolt of linen, madder root, the shuttle, raw wool, an unfinished coat",
        """
        The loom in the attic had come from an aunt and creaked like a ship.
        {name} dyed the yarn {colour} with bark gathered {when}.
        {who_} could name the village of a cloth by its border.
        In {where} the windows faced north, because colours lie in the sun.
        A single broken thread cost {name2} {while}.
        The river below {where} ran {colour} on some days and clear on others.
        Good felt needs hot water, {feeling} and a {quality} pair of hands.
        The pattern of {what} was drawn on the wall {manner}.
        Merchants came {when} and paid for {what} with coffee.
        {name} unpicked the sleeve three times before the guests arrived.
        Moths were fought with cedar, lavender and a {quality} cat.
        The guild met in {where} and argued about the width of a thumb.
        """,
    ),
    topic(
        "the mountain guides, the shepherds, the hut keepers, the rescue team, the surveyors",
        "the pass, the upper hut, the glacier, the summer pasture, the ravine",
        "the rope bridge, a cairn, the ewes, an iron pot, the weather station, a felt hat",
        """
        The path to the pass was marked with {colour} paint and old boots.
        {name} counted the sheep {when} and always began with the lame one.
        Above {where} the air is thin and the conversation too.
        {who_} carried firewood up and cheese down, {manner}.
        A stone rolled from {where} and missed {what} by the width of a hand.
        The keeper of the hut offered soup, a blanket and {quality} advice.
        In fog, {who} follow the sound of {what}.
        The glacier gave back a ladder that {name2} had lost {while} before.
        Snow closed the ravine {when}, earlier than the oldest shepherd could recall.
        From the saddle one sees two valleys, one {colour} and one in shadow.
        {name} slept with the window open to hear the ice.
        Maps of the region disagree about the height of {where}.
        """,
    ),
    topic(
        "the musicians, the choir, the organ builder, the dancers, the audience",
        "the concert hall, the rehearsal room, the village church, the bandstand, the workshop",
        "the cello, a cracked bell, the second movement, a borrowed score, the organ pipes, the metronome",
        """
        The choir rehearsed {when} in coats, because the heating had failed.
        {name} tuned the cello by the hum of the refrigerator next door.
        The organ of {where} has a stop that imitates {what}, badly.
        {who_} entered one bar late and finished together all the same.
        A {quality} echo in {where} doubled every consonant.
        The score bore {colour} pencil marks from at least three conductors.
        {name2} hummed the theme {manner} while sharpening reeds.
        During the interval, {who} discussed {what} and ate plums.
        An accordion had been left in {where} and was played by everyone.
        The drum was made from a barrel that had once held {colour} olives.
        The last note lasted {while}, or so it seemed to {who}.
        Nobody applauded between movements, except {name}, out of {feeling}.
        """,
    ),
    topic(
        "the printers, the typesetters, the librarians, the bookbinders, the proofreaders",
        "the print shop, the reading room, the archive, the bindery, the newspaper office",
        "a lead letter, the card catalogue, a torn page, the paper knife, a stack of almanacs, the inking roller",
        """
        The press in {where} was slow, loud and {quality}.
        {name} set whole pages in a mirror script that only {who} could read.
        A missing comma delayed the almanac for {while}.
        {who_} smelled of glue, and of {feeling} on Fridays.
        The catalogue of the library listed {what} under agriculture.
        {name2} repaired the spine {manner}, using thread from a {colour} curtain.
        Readers of {where} are asked not to feed the cat.
        The newspaper appeared {when} and was passed from house to house.
        In the margin somebody had drawn {what} with a {quality} line.
        Paper was scarce, so poems were printed on the back of {colour} wallpaper.
        The proof was corrected {when}, by candle, with a goose feather.
        A box in {where} holds the letters that the alphabet no longer needs.
        """,
    ),
    topic(
        "the teachers, the pupils, the caretaker, the examiners, the parents",
        "the schoolyard, the classroom, the assembly hall, the boarding house, the science room",
        "a wooden ruler, the globe, the attendance list, a jar of tadpoles, the blackboard, the spelling test",
        """
        Lessons began {when} with a song about {what}.
        {name} could not spell the word rhythm but played it perfectly.
        The globe in {where} still showed empires that had dissolved.
        {who_} wrote on slates, later in {colour} exercise books.
        A window in {where} was broken each spring and mended each autumn.
        The caretaker explained fractions better than {name2} did.
        The class kept {what} on the sill and voted on its name.
        For a dare, {name} rang the bell {when}.
        The play ended {manner}, since the curtain was stuck.
        Examiners arrived with {quality} faces and left with cake.
        In the corridor hung {colour} coats, and beneath them one lost shoe.
        Homework on {what} was collected and never returned.
        """,
    ),
    topic(
        "the potters, the glass blowers, the kiln masters, the tile makers, the market sellers",
        "the pottery, the kiln, the glassworks, the clay pit, the showroom",
        "blue glaze, a lopsided jug, wet clay, the potter's wheel, a crate of tiles, the furnace",
        """
        The kiln was fired {when} and not opened for {while}.
        {name} pressed a leaf into every bowl as a signature.
        Clay from the lower pit turns {colour}, that from the upper {quality} and grey.
        {who_} tested the heat by throwing {feeling} and a handful of salt.
        A lopsided jug, {name2} argued, pours better than a straight one.
        In {where} nobody whistled while the glass was soft.
        The glaze ran {manner}, leaving a {colour} tear on each handle.
        Broken pieces paved the way from {where} to the road.
        An order for {what} arrived from a hotel that had burned down.
        {name} threw cups all day and drank from a tin.
        The wheel was turned by foot, by donkey and finally by the stream.
        At the fair, {who} tapped each pot and listened {manner}.
        """,
    ),
    topic(
        "the astronomers, the night watch, the lens grinders, the students, the farmers",
        "the observatory, the dome, the hilltop, the instrument room, the darkroom",
        "the telescope, a star chart, the brass clock, a cloudy plate, the meridian line, the eclipse",
        """
        The dome was opened {when}, by a crank that took {who} and a rope.
        {name} drew the craters of the moon {manner}.
        Clouds covered {where} for {while}, and chess was played instead.
        {who_} asked whether the comet would spoil the milk.
        A lens is finished when the {quality} grinder grows bored, said {name2}.
        In {where} the lamps wore {colour} glass to spare the eyes.
        The brass clock lost a little every night and gained it back {when}.
        Moths were drawn to {what} more strongly than the public was.
        The eclipse began as predicted, to the {feeling} of {who}.
        {name} found a faint smudge on the plate and called it a thumb.
        Sheep grazed up to the walls of {where} and coughed like people.
        For the anniversary, {what} was polished and pointed at the town hall.
        """,
    ),
    topic(
        "the cooks, the waiters, the innkeepers, the lodgers, the mushroom pickers",
        "the inn, the kitchen, the dining room, the pantry, the courtyard",
        "barley soup, a copper pan, pickled lemons, the guest book, smoked cheese, the cellar key",
        """
        Soup was served {when} from a pot that was never quite empty.
        {name} seasoned by smell, since a fever had taken the taste.
        The inn had more stairs than rooms, and a {colour} cat on each.
        {who_} complained of the bed and came back every year.
        A sauce of plums and {feeling}, the menu promised.
        In {where} a parrot repeated the orders {manner}.
        {name2} bought mushrooms only from pickers with {quality} baskets.
        Travellers signed the guest book with drawings of {what}.
        The copper pan had been flattened by a cart and hammered out {when}.
        Lodgers shared {where}, {what} and a single {colour} towel.
        On rainy evenings the cook told stories in which {who} behaved badly.
        The key to the pantry hung where everyone could find it, except {name}.
        """,
    ),
)
