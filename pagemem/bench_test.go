package pagemem

import (
	"fmt"
	"testing"
)

// BenchmarkBulk allocates n pages at once, in one of the two forms, and frees them at once. One operation is one page.
func BenchmarkBulk(b *testing.B) {
	for _, form := range []string{"array", "list"} {
		for _, n := range []int{1, 2, 4, 8, 16, 32, 64, 128} {
			b.Run(fmt.Sprintf("form=%s/n=%d", form, n), func(b *testing.B) {
				a := newArena(b, 64, 0)
				ids := make([]PageID, n)
				for i := 0; i < b.N; i += n {
					if form == "array" {
						a.AllocBulk(ids)
					} else {
						p, got := a.AllocList(n)
						for j := range got {
							ids[j] = p
							p = a.ListNext(p)
						}
					}
					a.FreeBulk(ids)
				}
			})
		}
	}
}
