package attach

import (
	"os"
	"testing"

	"github.com/vhostd/vhostd/internal/testmain"
)

func TestMain(m *testing.M) {
	RunHelper()
	os.Exit(testmain.Run(m, testmain.Files(), testmain.Mappings("memfd:"), testmain.Goroutines()))
}
