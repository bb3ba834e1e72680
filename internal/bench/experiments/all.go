package experiments

import "github.com/vhostd/vhostd/internal/bench"

// All lists the experiments in the order of a report. Those with the same command run together.
func All() []bench.Experiment {
	return []bench.Experiment{
		netAlloc(),
		netAllocPoll(),
		pageFrag(),
		fragDrop(),
		fragPool(),
		fragPoolCPU(),
		fragPoolPassthrough(),
		poolRefill(),
		arenaBulk(),
		rxDrop(),
		poolPaths(),
		crossReturn(),
		copies(),
		copyVictim(),
		rings(),
	}
}

// Commands are the names that vhostd bench knows, each with its experiments.
func Commands() (names []string, byName map[string][]bench.Experiment) {
	byName = map[string][]bench.Experiment{}
	for _, e := range All() {
		if byName[e.Command] == nil {
			names = append(names, e.Command)
		}
		byName[e.Command] = append(byName[e.Command], e)
	}
	return names, byName
}
