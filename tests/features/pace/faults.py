"""Faults to plant in what slow readers do."""

from faults import answers, fault, instead
from planting import changed

from torch_ros.features.pace import rules
from torch_ros.protocol.seat import call_now, calls_of
from torch_ros.store.loops import Done


@instead("a slow source is left for a far one", "another", scenario="slow seed")
def _(another, *args, **options):
    with changed("distance", lambda _: lambda *_: 0):
        return another(*args, **options)


fault("who is slow relays on", "step_aside", scenario="slow relay")(
    lambda _: lambda view, seat, call, **_: Done(call)
)


@fault("who steps aside takes its place still", "step_aside", scenario="kept place")
def _(step_aside):
    return lambda view, seat, call, **_: step_aside(view, seat, call, ())


@instead("no answer is a refusal", "ClaimedSources.glance", scenario="unheard")
def _(glance, self, ranges, rule, *, unknown):
    return glance(self, ranges, rule, unknown=unknown if unknown is not None else self.known)


@instead(
    "a slow one is a leaf before it hears of it",
    "ClaimedSources.candidates",
    scenario="unheard, and orphaned",
)
def _(candidates, self, view):
    self.known = call_now(view, self.seat, self.known)
    return candidates(self, view)


fault("nobody need relay", "_filling", scenario="last relay")(lambda _: lambda *_: (99, 0))
fault("a slow one rests for ever", "_shall_rest", scenario="rests once")(
    lambda shall: lambda view, seat, ref: any(rules.is_aside(call) for call in calls_of(view, seat))
)
answers("who rested is forgotten at once", "_shall_rest", value=False, scenario="rests once")
fault("a seed rests", "pace:_near", scenario="seed rests not")(lambda _: lambda *_: [None])


answers("a leaf tells what it has", "Progress.hush", scenario="slow relay")


answers("a leaf reads older ones only", "SlowOnes.is_leaf", value=False, scenario="slow relay")


fault("a leaf follows each newcomer", "LEFT_MAX", scenario="settled leaf")(lambda _: 99)
fault("who is slow is suspected", "SourceLost.orderly", scenario="slow relay")(
    lambda _: lambda lost: lost
)


@fault("who waits for its own source is slow", "Pace.is_behind", scenario="slow source")
def _(is_behind):
    return lambda self, now_s, landed, shown: is_behind(self, now_s, landed, 4 * shown + 99)


answers("a relay tells nobody its rate", "Progress.tell_rate", scenario="slow behind a slow one")
answers("to wait for a source is to be slow", "Landings.resume", scenario="slow behind a slow one")


@fault("one slow window is enough", "Pace.is_slower", scenario="all become slow")
def _(is_slower):
    return lambda self, *rates: is_slower(self, *rates) or is_slower(self, *rates)


@instead("a relay tells the rate of long ago", "Landings.add", scenario="all become slow")
def _(add, self, *landing):
    told, is_window = self.told, add(self, *landing)
    self.told = told or self.told
    return is_window
