package layercheck

import (
	"fmt"
	"go/ast"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestDocumentedTestsExist compares the names in docs/testing.md with the tests of the module.
func TestDocumentedTestsExist(t *testing.T) {
	text := testingDoc(t)
	exists := map[string]bool{}
	for _, s := range sources(t) {
		for _, declaration := range s.file.Decls {
			if function, ok := declaration.(*ast.FuncDecl); ok && s.test() {
				exists[function.Name.Name] = true
			}
		}
	}
	for _, match := range regexp.MustCompile("`((?:Test|Fuzz)[A-Za-z0-9_]+)").FindAllStringSubmatch(text, -1) {
		if name := match[1]; !exists[name] {
			t.Errorf("docs/testing.md names %s, which does not exist", name)
		}
	}
}

func testingDoc(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("../../docs/testing.md")
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// TestHostileInputsAreListed: every hostile input has a row of TestRows, and docs/testing.md names that.
func TestHostileInputsAreListed(t *testing.T) {
	played := map[string]string{}
	files, err := filepath.Glob("../../integration/hostile/rows_*_test.go")
	if err != nil || len(files) == 0 {
		t.Fatalf("no rows: %v", err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, match := range regexp.MustCompile(`\{"([ABC][0-9]+)", "([a-z0-9_]+)",`).FindAllStringSubmatch(string(text), -1) {
			if played[match[1]] != "" {
				t.Errorf("%s is played twice", match[1])
			}
			played[match[1]] = match[2]
		}
	}
	doc := testingDoc(t)
	for _, group := range []struct {
		name string
		last int
	}{{"A", 27}, {"B", 32}, {"C", 88}} {
		for i := 1; i <= group.last; i++ {
			id := fmt.Sprint(group.name, i)
			if played[id] == "" {
				t.Errorf("integration/hostile does not play %s", id)
			}
			want := fmt.Sprintf("\n| %s | integration/hostile: `TestRows/%s_%s`", id, id, played[id])
			if !strings.Contains(doc, want) {
				t.Errorf("docs/testing.md does not say that %s is played by TestRows/%s_%s", id, id, played[id])
			}
			delete(played, id)
		}
	}
	for id := range played {
		t.Errorf("integration/hostile plays %s, which nobody has heard of", id)
	}
}
