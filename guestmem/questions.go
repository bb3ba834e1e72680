package guestmem

import "slices"

// maxQuestions bounds what is wanted at a time: every ring of a session asks for
// one address, or one of each of its areas. More can only be of rings that are gone.
const maxQuestions = 1024

// Question is an address that a ring wants to be translated.
type Question struct {
	Addr  uint64
	Write bool
}

// questions are those that nobody has answered, oldest first. Asked again they
// are not put again: the peer has them, and one that got an answer of too few
// rights would only get the same. IOTLB's lock guards them.
type questions struct {
	open   []openQuestion
	notify func()
}

type openQuestion struct {
	Question
	put bool // the peer was told
}

// Want implements Translator.
func (t *IOTLB) Want(addr, _ uint64, write bool) (now bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.entries.find(addr, write) != nil {
		return true
	}
	q := Question{addr, write}
	if slices.ContainsFunc(t.open, func(o openQuestion) bool { return o.Question == q }) {
		return false
	}
	if len(t.open) == maxQuestions {
		t.open = slices.Delete(t.open, 0, 1)
	}
	t.open = append(t.open, openQuestion{Question: q})
	t.notify()
	return false
}

// Next returns the oldest question that was not put to the peer, which the
// caller does now.
func (t *IOTLB) Next() (q Question, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := range t.open {
		if o := &t.open[i]; !o.put {
			o.put = true
			return o.Question, true
		}
	}
	return Question{}, false
}

// PutAgain has Next return all questions once more, for another peer. It does not
// notify.
func (t *IOTLB) PutAgain() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := range t.open {
		t.open[i].put = false
	}
}
